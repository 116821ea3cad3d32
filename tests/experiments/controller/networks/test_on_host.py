"""What the networks give one request, on the host by arrays, against the modules themselves."""

import math

import numpy as np
import pytest
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.on_host import HostNetworks
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from tests.experiments.controller.networks.hand_made_networks import trained_looking

PUBLISHED = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Block 2 is the least important: behind a pause of 3 or more all 16 blocks have to run.
SCORES = BlockChoice(scores={block: (0.0 if block == 2 else 1.0 - block / 100) for block in range(1, 16)})


@pytest.fixture(scope="module")
def networks() -> TwoStageNetworks:
    return trained_looking(TwoStageNetworks(action_space(PUBLISHED, SCORES), 192, embedding_rms=0.03, seed=4))


@torch.no_grad()
def test_logits_are_those_of_the_modules(networks: TwoStageNetworks) -> None:
    host, generator = HostNetworks(networks), torch.Generator().manual_seed(3)
    prompt, states = torch.randn(192, generator=generator), torch.randn(2, 192, generator=generator)
    code = networks.code_of(torch.tensor([0.5], dtype=torch.float64))
    ours = host.budget(0.5)
    known = networks.code_in(code)[0] + networks.prompt_in.bias
    torch.testing.assert_close(torch.from_numpy(ours.known), known, rtol=1e-5, atol=1e-6)
    tiers, pauses = host.first(prompt.numpy(), ours)
    first = torch.tensor([*tiers, *pauses])
    torch.testing.assert_close(first, networks.first(prompt[None], code)[0], rtol=1e-4, atol=1e-4)
    for pause in range(5):
        chosen = torch.tensor([[1, pause]])
        top_ks, blocks = host.second(states.numpy(), 1, pause)
        second = torch.tensor([*top_ks, *blocks])
        torch.testing.assert_close(second, networks.second(states[None], chosen)[0], rtol=1e-4, atol=1e-4)
        assert [math.isinf(each) for each in second[5:].tolist()] == [pause >= 2] * 4 + [False]


def test_weights_are_those_of_the_moment(networks: TwoStageNetworks) -> None:
    host = HostNetworks(networks)
    before = host.budget(0.5).token
    with torch.no_grad():
        networks.budget.encode.bias.add_(1.0)
        # Float32 of the same numbers; other weights move it by far more.
        np.testing.assert_allclose(host.budget(0.5).token, before, rtol=1e-4, atol=1e-4)
        assert not np.allclose(HostNetworks(networks).budget(0.5).token, before, rtol=1e-2, atol=1e-2)
        networks.budget.encode.bias.sub_(1.0)
