"""Decisions of both stages against the modules' log-probabilities, and what may be decided at all."""

import pytest
import torch

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiments.controller.knob_choices import KnobSpace, choice_of
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.running.deciders import FirstDecision, NetworkDecider
from tests.experiments.controller.networks.hand_made_networks import trained_looking
from tests.experiments.controller.running.fixed_decider import FixedDecider

PUBLISHED = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Block 2 is the least important: behind a pause of 3 or more all 16 blocks have to run.
SCORES = BlockChoice(scores={block: (0.0 if block == 2 else 1.0 - block / 100) for block in range(1, 16)})
BUDGETS_S = [10 ** (exponent / 8) for exponent in range(-24, 17)]
# Of the size of embeddings, not centred.
EMBEDDINGS = 0.03 * torch.randn(50, 192, generator=torch.Generator().manual_seed(2)) + 0.01


@pytest.fixture(scope="module")
def networks() -> TwoStageNetworks:
    return trained_looking(TwoStageNetworks(action_space(PUBLISHED, SCORES), 192, embedding_rms=0.03, seed=4))


@pytest.fixture
def logits(networks: TwoStageNetworks) -> ActionLogits:
    return ActionLogits(networks, EMBEDDINGS.numpy(), torch.device("cpu"))


@torch.no_grad()
def test_choices_and_tokens_are_those_of_the_modules(networks: TwoStageNetworks, logits: ActionLogits) -> None:
    decider, generator = NetworkDecider(logits, networks.space), torch.Generator().manual_seed(2)
    found, expected = set(), set()
    for place, budget_s in enumerate(BUDGETS_S * 5):
        ids = torch.randint(50, (1 + place % 4,), generator=generator)
        # Of the size of states behind some blocks.
        states = 10 ** (place % 4) * torch.randn(2, 192, generator=generator) - 0.5
        budget = torch.tensor([budget_s], dtype=torch.float64)
        first, token = decider.first(ids, budget_s)
        torch.testing.assert_close(token[0], networks.budget_token(budget), rtol=1e-5, atol=1e-7)
        decider.rehearse()
        second = decider.second(states)
        prompt, seen, actions = decider.seen
        torch.testing.assert_close(prompt, EMBEDDINGS[ids].mean(dim=0), rtol=1e-5, atol=1e-7)
        assert torch.equal(seen, states)
        log_probs = networks.log_probs(prompt[None], budget, states[None], torch.tensor([actions[:2]]))
        by_modules = [int(each.argmax()) for each in log_probs]
        assert list(actions) == by_modules
        assert (first.tier, second.level("top_k")) == (PUBLISHED.tiers[by_modules[0]], PUBLISHED.top_ks[by_modules[2]])
        assert (first, second) in decider.possible()
        found.add((first, second))
        expected.add(tuple(by_modules))
    # They do not all choose the same.
    assert len(found) == len(expected) > 20


def test_all_that_may_be_decided(networks: TwoStageNetworks, logits: ActionLogits) -> None:
    # 3 tiers x 5 top-k x (2 pauses x 5 numbers of blocks + 3 pauses x all blocks alone).
    decisions = NetworkDecider(logits, networks.space).possible()
    assert len(decisions) == len(set(decisions)) == 3 * 5 * (2 * 5 + 3 * 1)
    second = Setting.of(top_k=4, num_active_blocks=RunningBlocks(12))
    assert FixedDecider(choice_of("low", 4, 12), 2).possible() == [(FirstDecision("low", 2), second)]


def test_draws_follow_the_probabilities(networks: TwoStageNetworks, logits: ActionLogits) -> None:
    decider = NetworkDecider(logits, networks.space, torch.Generator().manual_seed(5))
    ids = torch.tensor([7, 9])
    fractions = networks.log_probs(
        EMBEDDINGS[ids].mean(dim=0)[None], torch.tensor([0.5], dtype=torch.float64), torch.zeros(1, 2, 192),
        torch.tensor([[0, 0]]),
    )[0].exp()[0]  # fmt: skip
    drawn = [PUBLISHED.tiers.index(decider.first(ids, 0.5)[0].tier) for _ in range(2000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=3) / 2000
    # Three standard deviations of a share of one half.
    torch.testing.assert_close(counts, fractions.detach(), rtol=0, atol=0.034)
