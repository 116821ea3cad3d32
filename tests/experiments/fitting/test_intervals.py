"""Draws keep clusters whole; intervals are percentiles and order statistics."""

import numpy as np
import pytest

from experiments.fitting.intervals import (
    bootstrap_interval,
    bootstrap_intervals,
    conformal_ratios,
    draw_counts,
    interval,
    intervals,
    resampled,
)


def test_a_draw_is_of_as_many_clusters_as_there_are() -> None:
    drawn = resampled(np.random.default_rng(0), 4, 500)
    assert drawn.shape == (500, 4) and (drawn.sum(axis=1) == 4).all()
    # Each is left out of a draw with probability 0.75^4 = 0.316.
    assert (drawn == 0).mean() == pytest.approx(0.316, abs=0.04)


def test_draws_give_all_settings_the_same_pictures_and_keep_those_with_times() -> None:
    # Samples 0 and 1 show one picture; only the first four samples have times (pattern 3).
    counts = draw_counts(["a", "a", "b", "c", "d", "e"], np.array([3, 3, 3, 3, 1, 1]), 200, seed=1)
    assert (counts[:, 0] == counts[:, 1]).all()
    # Pictures a, b and c are drawn three times in all, d and e twice.
    assert (counts[:, 0] + counts[:, 2] + counts[:, 3] == 3).all()
    assert (counts[:, 4] + counts[:, 5] == 2).all()
    assert np.unique(counts[:, 0]).tolist() == [0, 1, 2, 3]


def test_percentile_intervals_by_hand() -> None:
    # 0 to 200: 2.5 % and 97.5 % of the way.
    draws = np.arange(201.0)
    assert interval(draws) == pytest.approx((5.0, 195.0))
    assert interval(np.append(draws, np.nan)) == pytest.approx((5.0, 195.0))
    both = np.stack([draws, 2 * draws], axis=1)
    assert np.allclose(intervals(both), [(5.0, 195.0), (10.0, 390.0)])
    both[0, 1] = np.nan
    assert intervals(both)[0] == pytest.approx((5.0, 195.0))


def test_interval_ends_are_order_statistics() -> None:
    # n = 19 at 90 %: k = floor(20 x 0.05) = 1, the extremes; n = 39: k = 2, the second from either end.
    assert conformal_ratios(np.arange(1.0, 20.0), 0.9) == (1.0, 19.0)
    assert conformal_ratios(np.arange(1.0, 40.0)[::-1], 0.9) == (2.0, 38.0)
    assert conformal_ratios(np.array([1.5, 0.5]), 0.9) == (0.5, 1.5)
    assert conformal_ratios(np.array([]), 0.9) == (1.0, 1.0)


def test_intervals_of_many_rows_are_those_of_each() -> None:
    source = np.random.default_rng(1)
    sums, counts = source.uniform(1.0, 9.0, (3, 7)), source.uniform(1.0, 3.0, (3, 7))
    each = [bootstrap_interval(*row) for row in zip(sums, counts, strict=True)]
    assert np.array(bootstrap_intervals(sums, counts)) == pytest.approx(np.array(each), rel=1e-12)
