"""Groups stay together, in folds and drawn shares; errors are relative to what was measured."""

import numpy as np
import pytest

from experiments.fitting.held_out import deviations, drawn_groups, left_out_masks, relative_error, score
from tests.experiments.analyses.latency.synthetic_samples import working_samples


def test_a_setting_is_in_one_fold_and_folds_are_of_like_size() -> None:
    settings = working_samples().settings
    masks = list(left_out_masks(settings, 5))
    assert all(len(set(mask[settings == each])) == 1 for each in set(settings) for mask in masks)
    # 27 settings of 4 samples in 5 folds: 5 or 6 settings each.
    assert sorted(mask.sum() for mask in masks) == [20, 20, 20, 24, 24]


def test_each_sample_is_left_out_once() -> None:
    groups = np.array(["a", "b", "a", "c"])
    masks = list(left_out_masks(groups, 3))
    assert sum(mask.astype(int) for mask in masks).tolist() == [1, 1, 1, 1]
    assert sorted(mask.tolist() for mask in masks) == [
        [False, False, False, True], [False, True, False, False], [True, False, True, False],
    ]  # fmt: skip


def test_a_fraction_of_the_groups_of_each_stratum_is_drawn() -> None:
    groups, strata = ["a", "a", "b", "b", "c"], ["x", "x", "x", "y", "y"]
    for seed in range(5):
        # Of a and b one; b, where it was drawn, is the one of b and c too, or else c is.
        drawn = drawn_groups(groups, strata, 0.5, seed)
        assert drawn.tolist() in ([True, True, False, False, True], [False, False, True, True, False])


def test_what_is_absent_or_not_above_0_has_no_deviation() -> None:
    nan = float("nan")
    found = deviations(np.array([11.0, 8.0, 3.0, nan, 1.0]), np.array([10.0, 10.0, nan, 1.0, 0.0]))
    assert found.tolist() == pytest.approx([0.1, -0.2])


def test_relative_error_by_hand() -> None:
    # 10 % over, 20 % under, one that is absent.
    measured = np.array([10.0, 10.0, np.nan])
    assert relative_error(np.array([11.0, 8.0, 3.0]), measured) == pytest.approx(0.15)
    assert relative_error(np.full_like(measured, np.nan), measured) == float("inf")


def test_a_score_by_hand() -> None:
    # + 5 %, - 20 %, + 50 %.
    found = score(np.array([1.05, 0.8, 3.0]), np.array([1.0, 1.0, 2.0]))
    assert found is not None and (found.n, found.hit_rate) == (3, pytest.approx(1 / 3))
    assert (found.mape, found.bias) == (pytest.approx(0.25), pytest.approx(0.35 / 3))
    assert score(np.array([]), np.array([])) is None
