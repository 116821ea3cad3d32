"""Muon: a step by hand on diagonal matrices, and what happens to parameters without a gradient."""

import pytest
import torch
from torch import nn

from experiments.reference_model.muon import Muon, orthogonalise

FINITE = torch.tensor(True)
# Three products a step, each rounded to 8 bits (2**-9), five steps, and a slope of up to 3.4 on the way: about 0.06.
BFLOAT16 = 0.06


def _iterated(value: float) -> float:
    """One singular value after the five steps of the iteration."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


def test_orthogonalising_a_diagonal_matrix_iterates_on_its_singular_values() -> None:
    found = orthogonalise(torch.tensor([[[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]]))[0].float()
    expected = torch.tensor([[_iterated(0.6), 0.0, 0.0], [0.0, _iterated(0.8), 0.0]])
    torch.testing.assert_close(found, expected, atol=BFLOAT16, rtol=0)
    torch.testing.assert_close(
        orthogonalise(torch.tensor([[[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]]))[0].float(),
        expected.T,
        atol=BFLOAT16,
        rtol=0,
    )


def test_a_step_decays_and_follows_the_orthogonalised_momentum() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    optimiser = Muon([weight], momentum=0.5, weight_decay=0.1)
    weight.grad = torch.zeros(4, 2)
    weight.grad[0, 0], weight.grad[1, 1] = 3.0, 4.0
    optimiser.step(0.2, FINITE)
    expected = torch.full((4, 2), 1 - 0.2 * 0.1)
    expected[0, 0] -= 0.2 * 2**0.5 * _iterated(0.6)  # twice as many rows as columns
    expected[1, 1] -= 0.2 * 2**0.5 * _iterated(0.8)
    torch.testing.assert_close(weight.detach(), expected, atol=0.2 * 2**0.5 * BFLOAT16, rtol=0)
    torch.testing.assert_close(optimiser.state_dict()["buffers"][0][0], weight.grad / 2)


def test_a_gradient_that_is_not_finite_only_decays() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimiser = Muon([weight], momentum=0.5, weight_decay=0.1)
    weight.grad = torch.full((2, 2), torch.nan)
    optimiser.step(0.2, torch.tensor(False))
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.98))


@pytest.mark.parametrize("reached", [0, 1])
def test_a_parameter_without_a_gradient_stays_as_it_is(reached: int) -> None:
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimiser = Muon(weights, momentum=0.5, weight_decay=0.1)
    for weight in weights:
        weight.grad = torch.eye(2)
    optimiser.step(0.2, FINITE)
    before = [weight.detach().clone() for weight in weights]
    momenta = optimiser.state_dict()["buffers"][0].clone()
    weights[1 - reached].grad = None
    optimiser.step(0.2, FINITE)
    after = optimiser.state_dict()["buffers"][0]
    assert torch.equal(weights[1 - reached], before[1 - reached])
    assert torch.equal(after[1 - reached], momenta[1 - reached])
    assert not torch.equal(weights[reached], before[reached])
    torch.testing.assert_close(after[reached], torch.eye(2) * 0.75)  # 0 to 1/2 to 3/4 of the way to the gradient
