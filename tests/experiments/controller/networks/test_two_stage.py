"""The networks: their size, what is still possible, the budget's features by hand."""

import math

import pytest
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import (
    MOST_PARAMETERS,
    BudgetToken,
    TwoStageNetworks,
    action_space,
    num_parameters,
    sinusoidal_features,
    width_for,
)
from tests.same_floats import assert_same_floats

PUBLISHED = KnobSpace(("low", "medium", "high"), (4, 5, 6, 7, 8), (12, 13, 14, 15, 16), 16, 8)
# Block 2 is the least important, then 15, 14, 13.
SCORES = BlockChoice(scores={block: (0.0 if block == 2 else 1.0 - block / 100) for block in range(1, 16)})


@pytest.mark.parametrize(("hidden_size", "width"), [(32, 64), (192, 64), (2048, 28), (3584, 12)])
def test_all_parameters_together_stay_within_the_limit(hidden_size: int, width: int) -> None:
    space = action_space(PUBLISHED, BlockChoice())
    networks = TwoStageNetworks(space, hidden_size, 1.0, seed=0)
    counted = sum(parameter.numel() for parameter in networks.parameters())
    assert width_for(hidden_size, space) == width
    assert counted == num_parameters(hidden_size, width, space) <= MOST_PARAMETERS
    assert width == 64 or num_parameters(hidden_size, width + 4, space) > MOST_PARAMETERS


def test_parameters_by_hand() -> None:
    # H = 10, inner width 4, 3 tiers + 5 pauses, 5 top-k + 5 counts, 24 features, code of 24.
    budget = 24 * 24 + 24 + 24 * 10 + 10
    first = 10 * 4 + 4 + 24 * 4 + 4 * 8 + 8
    second = 20 * 4 + 4 + 8 * 4 + 4 * 10 + 10
    assert num_parameters(10, 4, action_space(PUBLISHED, BlockChoice())) == budget + first + second


def test_a_model_too_wide_for_any_network_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than 250000 parameters"):
        TwoStageNetworks(action_space(PUBLISHED, BlockChoice()), 20_000, 1.0, seed=0)


def test_a_block_that_has_run_cannot_be_left_out() -> None:
    space = action_space(PUBLISHED, SCORES)
    # 16 blocks are all; any fewer leave out block 2, which has run behind a pause of 3 and more.
    assert space.pauses == (1, 2, 3, 4, 5)
    assert space.possible[:2] == ((True,) * 5,) * 2
    assert space.possible[2:] == ((False, False, False, False, True),) * 3


def test_a_pause_after_which_nothing_is_possible_is_no_choice() -> None:
    few = KnobSpace(("low",), (8,), (12, 13), 16, 8)
    assert action_space(few, SCORES).pauses == (1, 2)
    with pytest.raises(ConfigurationError, match="pause earlier"):
        action_space(few, SCORES, pauses=(3, 4))


def test_what_is_impossible_has_probability_0() -> None:
    networks = TwoStageNetworks(action_space(PUBLISHED, SCORES), 16, 1.0, seed=0)
    logits = networks.second(torch.randn(2, 2, 16), torch.tensor([[0, 1], [2, 4]]))
    _, blocks = networks.split_second(logits)
    assert torch.isfinite(blocks[0]).all()
    assert blocks[1].tolist() == pytest.approx([-math.inf] * 4 + [0.0], abs=1e-6)


def test_each_choice_is_about_equally_likely_at_first_and_seeds_decide() -> None:
    space = action_space(PUBLISHED, BlockChoice())
    budgets, prompts = torch.tensor([0.3, 0.6], dtype=torch.float64), torch.randn(2, 16)
    networks = TwoStageNetworks(space, 16, 1.0, seed=4)
    first = networks.first(prompts, networks.code_of(budgets))
    tier, pause = networks.split_first(first)
    assert (tier.exp() - 1 / 3).abs().max() < 0.1 and (pause.exp() - 0.2).abs().max() < 0.1
    same, other = (TwoStageNetworks(space, 16, 1.0, seed=seed) for seed in (4, 5))
    assert_same_floats(same.first(prompts, same.code_of(budgets)), first)
    assert not torch.allclose(other.first(prompts, other.code_of(budgets)), first, atol=1e-2)


def test_features_of_a_budget_by_hand() -> None:
    features = sinusoidal_features(torch.tensor([0.001, math.e**4 / 1000], dtype=torch.float64))
    assert features.shape == (2, 24)
    # ln(1 ms) = 0: all sines 0, all cosines 1.
    assert features[0].tolist() == [0.0] * 12 + [1.0] * 12
    # ln(e^4) = 4: an eighth of the longest period of 32; 16 whole turns of the shortest of 0.25.
    assert features[1, 0].item() == pytest.approx(math.sqrt(0.5))
    assert features[1, 11].item() == pytest.approx(0.0, abs=1e-5)
    assert features[1, 23].item() == pytest.approx(1.0)


def test_a_token_is_as_long_as_an_embedding() -> None:
    torch.manual_seed(0)
    budget = BudgetToken(16, embedding_rms=0.25)
    token = budget.token(budget.code(sinusoidal_features(torch.tensor([0.1, 3.0], dtype=torch.float64))))
    assert token.pow(2).mean(dim=1).sqrt().tolist() == pytest.approx([0.25, 0.25], rel=1e-4)
