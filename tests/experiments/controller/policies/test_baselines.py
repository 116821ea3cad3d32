"""Baselines on the hand-made grid: what each chooses, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.controller.evaluation.replay import shares_of_reference
from experiments.controller.knob_choices import choice_of
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.policies.baselines import InTimeRegression, baselines, chosen_table, one_knob_tables
from tests.experiments.controller.hand_made_requests import FAST, MIDDLE, SLOW, grid, request


def many() -> MeasuredGrid:
    """Twenty readings that need the middle choice, and twenty countings that the fast one gets right alone."""
    kinds = np.arange(40) % 2
    right = np.array([1 - kinds, kinds, 0 * kinds])[[1, 0, 2]].astype(float)
    return replace(
        grid(),
        tasks=("signs",) * 40,
        sample_ids=tuple(range(40)),
        pictures=tuple(f"picture {at}" for at in range(40)),
        scores=right,
        best=np.ones(40),
        total_s=np.array([[0.1], [0.2], [0.6]]) * np.ones(40),
        requests=None,
        prompts=tuple("count the cars" if kind else "read the sign" for kind in kinds),
    )


def test_one_knob_alone_leaves_the_others_at_their_highest() -> None:
    made = grid()
    choices = (choice_of("low", 8, 16), choice_of("high", 4, 16), SLOW)
    tier, top_k, blocks = one_knob_tables(replace(made, choices=choices))
    assert [each.name for each in (tier, top_k, blocks)] == ["only_tier", "only_top_k", "only_num_active_blocks"]
    # At 250 ms low has two of four right in time, the second choice two of four, the largest none.
    assert [each.choose(request(), 0.25) for each in (tier, top_k, blocks)] == [choices[0], choices[1], SLOW]


def test_a_knob_that_the_model_lacks_has_no_table_of_its_own() -> None:
    choices = choice_of("own", None, 12), choice_of("own", None, 14), choice_of("own", None, 16)
    (only,) = one_knob_tables(replace(grid(), choices=choices))
    assert (only.name, only.choose(request(), 0.25)) == ("only_num_active_blocks", choices[0])
    tokens = choice_of("288 tokens", None, 12), choice_of("576 tokens", None, 12), choice_of("576 tokens", None, 16)
    assert [each.name for each in one_knob_tables(replace(grid(), choices=tokens))] == [
        "only_tier", "only_num_active_blocks"]  # fmt: skip


def test_folds_of_one_picture_are_refused() -> None:
    with pytest.raises(ResultsError, match="4 samples of one picture cannot be split; measure more samples, or drop"):
        baselines(replace(grid(), pictures=("a",) * 4), (0.3,))


def test_a_regression_distinguishes_kinds_of_prompts() -> None:
    policy = InTimeRegression(many())
    requests = replace(request(99), prompt="read the word"), replace(request(98), prompt="count the dogs")
    assert [policy.choose(each, 0.3) for each in requests] == [MIDDLE, FAST]
    # At 0.15 s the middle choice is late: nothing is gained by a reading.
    assert [policy.choose(each, 0.15) for each in requests] == [FAST, FAST]


def test_the_chosen_table_is_the_best_on_the_calibration_half() -> None:
    """A table of all requests has one half right, one of similar prompts all of them."""
    policy = chosen_table(many(), (0.3,))
    assert policy.choose(replace(request(99), prompt="read the word"), 0.3) == MIDDLE
    assert policy.choose(replace(request(98), prompt="count the dogs"), 0.3) == FAST


def test_without_prompts_none_is_made_that_needs_them() -> None:
    names = [each.name for each in baselines(replace(many(), prompts=None), (0.3,))]
    assert names == [
        "lookup_mean", "lookup_p50", "lookup_p95", "lookup_p99", "lookup_in_time", "lookup_few_knobs",
        "lookup_mean_late0.05", "only_tier", "only_top_k", "only_num_active_blocks", "chosen_table",
    ]  # fmt: skip


def test_budgets_are_fractions_of_the_reference_or_without_one_of_the_largest_setting() -> None:
    # (400 + 500 + 600 + 700) / 4 = 550 ms.
    assert shares_of_reference(grid(), (1.0, 0.5)) == pytest.approx((0.275, 0.55))
    # Its own times, of the samples that have one: 300 ms.
    own = replace(grid(), reference=choice_of("own", 8, 16), reference_s=np.array([0.2, 0.4, np.nan, 0.3]))
    assert shares_of_reference(own, (1.0, 0.5)) == pytest.approx((0.15, 0.3))
    assert shares_of_reference(own.take(np.array([1])), (1.0,)) == pytest.approx((0.4,))
    with pytest.raises(ResultsError, match="no sample has a time at own_topk8_blocks16; measure it"):
        shares_of_reference(own.take(np.array([2])), (1.0,))


def test_single_knobs_are_turned_from_the_largest_requested_values_not_from_the_reference() -> None:
    reference = choice_of("own", 8, 16)
    made = grid()
    own = replace(
        made,
        choices=(*made.choices, reference),
        scores=np.vstack([made.scores, np.ones(4)]),
        total_s=np.vstack([made.total_s, np.full(4, 0.05)]),
        reference=reference,
        reference_in_grid=False,
        reference_s=np.full(4, 0.05),
    )
    assert own.largest == SLOW and own.landmarks == (FAST, SLOW, reference)
    tier, top_k, _ = one_knob_tables(own)
    # The vision knob can be left at the model's own; top-k is turned at `high` and 16 blocks, where only 8 is there.
    assert (tier.choose(request(), 1.0), top_k.choose(request(), 1.0)) == (reference, SLOW)
    requested = replace(own, reference_in_grid=True)
    assert requested.largest == reference and requested.landmarks == (FAST, reference)
