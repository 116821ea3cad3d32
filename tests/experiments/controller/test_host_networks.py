"""What the networks give one request, on the host by arrays, against the modules themselves."""

import math

import pytest
import torch

from experiment_core_utils.primitives.block_choice import BlockChoice
from experiments.controller.deciders import FirstDecision, FixedDecider, NetworkDecider, SecondDecision
from experiments.controller.host_networks import HostNetworks
from experiments.controller.knob_choices import KnobChoice, KnobSpace
from experiments.controller.two_stage_networks import TwoStageNetworks, action_space

PUBLISHED = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Block 2 is the least important: behind a pause of 3 or more all 16 blocks have to run.
SCORES = BlockChoice(scores={block: (0.0 if block == 2 else 1.0 - block / 100) for block in range(1, 16)})
BUDGETS_S = [10 ** (exponent / 8) for exponent in range(-24, 17)]


@pytest.fixture(scope="module")
def networks() -> TwoStageNetworks:
    made = TwoStageNetworks(action_space(PUBLISHED, SCORES), 192, embedding_rms=0.03, seed=4)
    # As a training leaves them: odds far from even, biases that are not zero.
    generator = torch.Generator().manual_seed(1)
    for head in (made.first_out, made.second_out):
        head.weight.data.mul_(40)
        head.bias.data.add_(torch.randn(head.bias.shape, generator=generator))
    return made


@torch.no_grad()
def test_choices_and_tokens_are_those_of_the_modules(networks: TwoStageNetworks) -> None:
    decider, generator = NetworkDecider(networks), torch.Generator().manual_seed(2)
    found, expected = set(), set()
    for place, budget_s in enumerate(BUDGETS_S * 5):
        # Of the size of embeddings and of states behind some blocks, not centred.
        prompt = 0.03 * torch.randn(192, generator=generator) + 0.01
        states = 10 ** (place % 4) * torch.randn(2, 192, generator=generator) - 0.5
        budget = torch.tensor([budget_s], dtype=torch.float64)
        first, token = decider.first(prompt, budget_s)
        torch.testing.assert_close(token[0], networks.budget_token(budget), rtol=1e-5, atol=1e-7)
        decider.rehearse()
        second = decider.second(states)
        assert torch.equal(decider.seen[0], prompt) and torch.equal(decider.seen[1], states)
        odds = networks.log_odds(prompt[None], budget, states[None], torch.tensor([decider.seen[2][:2]]))
        by_modules = [int(each.argmax()) for each in odds]
        assert list(decider.seen[2]) == by_modules
        assert (first.tier, second.top_k) == (PUBLISHED.tiers[by_modules[0]], PUBLISHED.top_ks[by_modules[2]])
        assert (first, second) in decider.possible()
        found.add((first, second))
        expected.add(tuple(by_modules))
    # They do not all choose the same.
    assert len(found) == len(expected) > 20


@torch.no_grad()
def test_odds_are_those_of_the_modules(networks: TwoStageNetworks) -> None:
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
        assert (host.budget(0.5).token == before).all()
        assert (HostNetworks(networks).budget(0.5).token != before).any()
        networks.budget.encode.bias.sub_(1.0)


def test_all_that_may_be_decided(networks: TwoStageNetworks) -> None:
    # 3 tiers x 5 top-k x (2 pauses x 5 numbers of blocks + 3 pauses x all blocks alone).
    decisions = NetworkDecider(networks).possible()
    assert len(decisions) == len(set(decisions)) == 3 * 5 * (2 * 5 + 3 * 1)
    assert FixedDecider(KnobChoice("low", 4, 12), 2).possible() == [(FirstDecision("low", 2), SecondDecision(4, 12))]


def test_draws_follow_the_odds(networks: TwoStageNetworks) -> None:
    decider = NetworkDecider(networks, torch.Generator().manual_seed(5))
    prompt = torch.randn(192, generator=torch.Generator().manual_seed(6))
    shares = networks.log_odds(
        prompt[None], torch.tensor([0.5], dtype=torch.float64), torch.zeros(1, 2, 192), torch.tensor([[0, 0]])
    )[0].exp()[0]  # fmt: skip
    drawn = [PUBLISHED.tiers.index(decider.first(prompt, 0.5)[0].tier) for _ in range(2000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=3) / 2000
    # Three standard deviations of a share of one half.
    torch.testing.assert_close(counts, shares.detach(), rtol=0, atol=0.034)
