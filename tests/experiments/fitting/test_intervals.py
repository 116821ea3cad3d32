"""Draws keep clusters whole; intervals are percentiles and order statistics."""

import numpy as np
import pytest

from experiments.fitting.intervals import (
    conformal_ratios,
    draw_counts,
    drawn_medians,
    drawn_sums,
    interval,
    intervals,
    ratio_intervals,
    resampled,
)


def test_a_draw_is_of_as_many_clusters_as_there_are() -> None:
    drawn = resampled(np.random.default_rng(0), 4, 500)
    assert drawn.shape == (500, 4) and (drawn.sum(axis=1) == 4).all()
    # Each is left out of a draw with probability 0.75^4 = 0.316.
    assert (drawn == 0).mean() == pytest.approx(0.316, abs=0.04)


def test_medians_of_draws_by_hand() -> None:
    counts = np.array([[1, 1, 1], [2, 0, 1], [0, 2, 2], [4, 0, 0]])
    # 10 20 30; 10 30 30; 10 10 20 20; 30 four times.
    assert drawn_medians(np.array([30.0, 10.0, 20.0]), counts).tolist() == [20.0, 30.0, 15.0, 30.0]
    # What is not there is not drawn.
    assert drawn_medians(np.array([np.nan, 10.0]), np.array([[0, 2]])).tolist() == [10.0]


@pytest.mark.parametrize("num_clusters", [4, 2500])
def test_sums_are_over_as_many_clusters_drawn_with_replacement(num_clusters: int) -> None:
    """Beside a column of ones; 2500 clusters are drawn in parts."""
    drawn = drawn_sums(np.stack([np.ones(num_clusters), np.arange(num_clusters)], axis=1), seed=3)
    assert drawn.shape == (2000, 2) and (drawn[:, 0] == num_clusters).all()
    # Mean of the draws' means, and their spread: the standard deviation of 0 ... G - 1 over the root of G.
    means = drawn[:, 1] / num_clusters
    spread = np.sqrt((num_clusters**2 - 1) / 12 / num_clusters)
    assert means.mean() == pytest.approx((num_clusters - 1) / 2, abs=0.1 * spread)
    assert means.std() == pytest.approx(spread, rel=0.08)


def test_ratio_intervals_of_many_rows_are_those_of_each_and_near_students() -> None:
    source = np.random.default_rng(1)
    sums, counts = source.uniform(1.0, 9.0, (3, 40)), np.ones((3, 40))
    each = [ratio_intervals(one[None], ones[None])[0] for one, ones in zip(sums, counts, strict=True)]
    assert np.array(ratio_intervals(sums, counts)) == pytest.approx(np.array(each), rel=1e-12)
    half = 2.02 * sums.std(axis=1, ddof=1) / np.sqrt(40)
    means = sums.mean(axis=1)
    assert np.array(each) == pytest.approx(np.stack([means - half, means + half], axis=1), rel=0.06)


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
