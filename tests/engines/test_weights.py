"""Layers' weights and biases lie one after the other and stay the layers' own; what cannot be fused is named."""

import pytest
import torch
from torch import nn

from experiment_core_utils.engines.weights import fused_rows, fusing_unsupported_reason


def layers() -> list[nn.Linear]:
    """Of 2 and 3 rows."""
    return [nn.Linear(4, 2), nn.Linear(4, 3)]


def test_rows_and_biases_in_the_order_of_the_layers() -> None:
    first, second = both = layers()
    weights, biases = [layer.weight.clone() for layer in both], [layer.bias.clone() for layer in both]
    assert torch.equal(fused_rows(both), torch.cat(weights))
    assert torch.equal(fused_rows(both, "bias"), torch.cat(biases))
    assert torch.equal(first.weight, weights[0]) and torch.equal(second.bias, biases[1])


def test_the_layers_own_are_views_that_can_be_written_to() -> None:
    _, second = both = layers()
    with torch.inference_mode():
        rows, biases = fused_rows(both), fused_rows(both, "bias")
    with torch.no_grad():
        second.weight[1, 3] = 42.0
        second.bias[2] = 43.0
    assert rows[2 + 1, 3] == 42.0
    assert biases[2 + 2] == 43.0
    assert second.weight.requires_grad and second.bias.requires_grad


class Replaced(nn.Linear):
    """As a quantiser leaves a layer."""


@pytest.mark.parametrize(
    ("also", "weights", "reason"),
    [
        ([], [torch.zeros(2), torch.ones(3)], None),
        ([Replaced(4, 4)], [torch.zeros(2)], "its weights are quantised"),
        ([], [torch.zeros(2), torch.zeros(2, dtype=torch.int8)], "its weights are quantised"),
        ([], [torch.zeros(2), torch.zeros(2, device="meta")], "its weights are on several devices (cpu, meta)"),
        ([], [torch.zeros(2, device="meta")], "its weights are not loaded"),
        ([], [torch.zeros(2), torch.zeros(2).half()], "its weights are in several dtypes (float16, float32)"),
    ],
)
def test_what_is_against_fusing(also: list[nn.Module], weights: list[torch.Tensor], reason: str | None) -> None:
    assert fusing_unsupported_reason([*layers(), *also], iter(weights)) == reason
