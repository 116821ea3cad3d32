"""How far fronts move with a knob held, and whether knobs depend on one another, by hand."""

import numpy as np
import pytest

from experiment_core_utils.primitives.replication import IN_ROUNDS, Replication
from experiments.analyses.knobs.coupling import couplings, fixed_values, moving_knobs, single_knobs
from experiments.analyses.knobs.objectives import Objectives
from tests.experiments.hand_made_grid import grid, measured, point
from tests.hand_made_replication import with_variance

NUM = 40


def sweep(
    accuracy: dict[tuple[str, int], float],
    ms: dict[tuple[str, int], float],
    variance: Replication = IN_ROUNDS,
) -> Objectives:
    """Vision and top-k at their keys; each setting right on the first samples, times spread by 5 % either way."""
    scores = [[1.0] * round(NUM * share) + [0.0] * (NUM - round(NUM * share)) for share in accuracy.values()]
    times = [value * np.linspace(0.95, 1.05, NUM) for value in ms.values()]
    return measured(grid([point(*key) for key in accuracy], scores, np.array(times), variance=variance))


KEYS = [("low", 1), ("low", 8), ("high", 1), ("high", 8)]


def vision_only() -> Objectives:
    """Top-k gives nothing and takes half as much time again."""
    return sweep(dict(zip(KEYS, (0.25, 0.25, 0.75, 0.75), strict=True)), dict(zip(KEYS, (10, 15, 20, 30), strict=True)))


def test_the_loss_is_the_area_between_the_fronts() -> None:
    rows = {(row.knob, row.value): row for row in fixed_values(vision_only())}
    assert list(rows) == [("vision", "low"), ("vision", "high"), ("top_k", 1), ("top_k", 8)]
    # Up to 33: jointly 0.25 x 10 + 0.75 x 13 = 12.25.
    # Low: 0.25 x 23 = 5.75. High: 0.75 x 13 = 9.75. Top-k 8: 0.25 x 15 + 0.75 x 3 = 6.
    losses = {key: row.loss.share for key, row in rows.items()}
    assert losses == {
        ("vision", "low"): pytest.approx(6.5 / 12.25),
        ("vision", "high"): pytest.approx(2.5 / 12.25),
        ("top_k", 1): pytest.approx(0.0, abs=1e-12),
        ("top_k", 8): pytest.approx(6.25 / 12.25),
    }
    assert [row.num_on_joint_front for row in rows.values()] == [1, 1, 2, 0]
    assert rows["top_k", 8].front == ("tier-low_topk8_blocks12", "tier-high_topk8_blocks12")
    assert [row.loss.beyond_noise for row in rows.values()] == [True, True, False, True]


@pytest.mark.parametrize(("std", "beyond"), [(0.0, True), (0.02, True), (0.2, False)])
def test_a_loss_that_may_be_the_machine_is_noise(std: float, beyond: bool) -> None:
    keys = [("low", 1), ("low", 8)]
    variance = with_variance(std**2, 20, 2)
    rows = fixed_values(sweep(dict.fromkeys(keys, 0.5), dict(zip(keys, (10, 11), strict=True)), variance))
    held_at_8 = next(row for row in rows if row.value == 8)
    # Up to 12.1: 0.5 x 2.1 jointly, 0.5 x 1.1 with top-k 8.
    assert held_at_8.loss.share == pytest.approx(1 / 2.1)
    assert held_at_8.loss.beyond_noise is beyond


def test_luck_with_the_samples_is_no_loss() -> None:
    # Three values of top-k with coin tosses of the same time: the best is ahead by luck.
    points = [point("low", top_k) for top_k in (1, 2, 4)]
    scores = (np.random.default_rng(5).random((3, 60)) < 0.5).astype(float)
    rows = fixed_values(measured(grid(points, scores, np.full((3, 60), 10.0))))
    assert max(row.loss.share or 0.0 for row in rows) > 0.02
    assert not any(row.loss.beyond_noise for row in rows)


def test_one_knob_alone_moves_from_the_largest_values_of_the_others() -> None:
    rows = {row.knob: row for row in single_knobs(vision_only())}
    # Vision alone, at top-k 8: 6 of 12.25. Top-k alone, at high: 0.75 x 13.
    assert rows["vision"].others == {"top_k": 8} and rows["top_k"].others == {"vision": "high"}
    assert rows["vision"].loss is not None and rows["vision"].loss.share == pytest.approx(6.25 / 12.25)
    assert rows["top_k"].loss is not None and rows["top_k"].loss.share == pytest.approx(2.5 / 12.25)


def test_a_line_that_the_grid_lacks_has_no_loss() -> None:
    keys = [("low", 1), ("low", 2), ("high", 1)]
    found = sweep(dict.fromkeys(keys, 0.5), dict(zip(keys, (10, 20, 30), strict=True)))
    rows = {row.knob: row for row in single_knobs(found)}
    assert rows["vision"].num_settings == 1 and rows["top_k"].num_settings == 1
    # Neither vision nor top-k can be compared at both values of the other.
    assert couplings(found) == []


def test_a_best_value_that_holds_everywhere_is_no_dependence() -> None:
    found = {(each.knob, each.given): each for each in couplings(vision_only())}
    top_k = found["top_k", "vision"]
    assert [(each.given, each.best, each.probability) for each in top_k.best_values] == [
        ("low", 1, 1.0),
        ("high", 1, 1.0),
    ]
    assert (top_k.dependence, top_k.witness, top_k.regret_share) == ("none", None, 0.0)


def test_values_that_surely_change_places_depend() -> None:
    # At low, top-k 1 is as right and faster; at high, top-k 8 is right far more often.
    found = sweep(
        dict(zip(KEYS, (0.25, 0.25, 0.25, 0.75), strict=True)), dict(zip(KEYS, (10, 20, 30, 31), strict=True))
    )
    coupling = next(each for each in couplings(found) if each.knob == "top_k")
    assert [each.best for each in coupling.best_values] == [1, 8]
    assert coupling.dependence == "established" and coupling.witness == (1, 8, "low", "high")
    # Up to 34.1: low 6.025 and 3.525, high 1.025 and 2.325. Best at each 8.35; always 1: 7.05, always 8: 5.85.
    assert coupling.regret_share == pytest.approx((8.35 - 7.05) / 8.35)


def test_values_that_change_places_by_one_answer_do_so_within_noise() -> None:
    found = sweep(
        dict(zip(KEYS, (0.500, 0.475, 0.500, 0.525), strict=True)), dict(zip(KEYS, (10, 10, 10, 10), strict=True))
    )
    assert next(each for each in couplings(found) if each.knob == "top_k").dependence == "within_noise"


def test_without_a_right_answer_there_is_nothing_to_lose() -> None:
    found = sweep(dict.fromkeys(KEYS, 0.0), dict(zip(KEYS, (10, 20, 30, 40), strict=True)))
    assert {row.loss.share for row in fixed_values(found)} == {None}
    assert couplings(found) == []


def test_one_setting_has_no_knob_that_moves() -> None:
    found = sweep({("low", 1): 0.5}, {("low", 1): 10})
    assert (moving_knobs(found), fixed_values(found), single_knobs(found), couplings(found)) == ((), [], [], [])
