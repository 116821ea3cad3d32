"""The ratio of two sides by hand, its level, and what finds two equal sides the same."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.fitting.run_ratios import LogRatio, chance_of_same, log_ratio, runs_for_same

PICTURES = np.arange(6)


def test_runs_of_both_sides_have_one_variance() -> None:
    one, other = np.array([[0.0], [0.02]]), np.array([[0.13], [0.09]])
    found = log_ratio(one, other, np.zeros(1, dtype=int), is_paired=False, between=9.0)
    assert found is not None
    # Squares 2 * 0.01^2 and 2 * 0.02^2 with one degree of freedom each: 0.0005 a run, of two runs a side.
    assert (found.mean, found.variance, found.degrees) == pytest.approx((0.1, 0.0005, 2))
    assert found.run_deviation == pytest.approx(math.sqrt(0.0005))
    half = 4.302653 * math.sqrt(0.0005)  # Student's t at 0.975 with 2
    assert found.interval(0.025) == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)))


def test_of_pairs_the_difference_is_one_value() -> None:
    one, other = np.array([[0.0], [0.5]]), np.array([[0.13], [0.59]])
    found = log_ratio(one, other, np.zeros(1, dtype=int), is_paired=True, between=9.0)
    assert found is not None
    # Differences 0.13 and 0.09: variance 0.0008, halved for two pairs and for the two runs of one.
    assert (found.mean, found.variance, found.degrees) == pytest.approx((0.11, 0.0004, 1))
    assert found.run_deviation == pytest.approx(0.02)


def test_a_run_a_side_has_the_stated_variance_beside_that_of_pictures() -> None:
    change = np.array([[0.03, -0.03, 0.03, -0.03, 0.03, -0.03]])
    found = log_ratio(np.zeros((1, 6)), 0.1 + change, PICTURES, is_paired=False, between=0.02, more=0.0001)
    # Of pictures: 0.0009 * 6 / 5 / 6 = 0.00018, with 5 degrees of freedom; of two runs 2 * 0.0004.
    assert found is not None
    assert found.samples_variance == pytest.approx(0.00018)
    assert found.variance == pytest.approx(0.0009 + 0.00018)
    assert found.degrees == pytest.approx(0.00108**2 / (0.00018**2 / 5))
    assert found.interval(0.025)[0] < found.interval_within_runs(0.025)[0] < math.exp(0.1)
    assert log_ratio(np.zeros((1, 6)), change, PICTURES // 2, is_paired=False, between=0.02) is None


def test_what_runs_and_pictures_both_contain_counts_once() -> None:
    """Noise of single samples makes runs and pictures differ; 3 pairs of runs, 2 pictures."""
    changes = np.array([[0.1, 0.3], [0.3, 0.6], [-0.1, 0.7]])
    found = log_ratio(np.zeros((3, 2)), changes, np.arange(2), is_paired=True, between=9.0)
    assert found is not None
    # Two-way layout: runs 0.2, 0.45, 0.3; pictures 0.1, 0.53; all 0.316. Mean squares of runs 0.0316 (2 degrees of
    # freedom), of pictures 0.2816 (1), of the rest 0.0516 (2); a mean of 6 varies by (runs + pictures - rest) / 6.
    runs, pictures, rest = 0.19 / 6, 0.2816666667, 0.31 / 6
    assert found.samples_variance == pytest.approx((pictures - rest) / 6)
    assert found.variance == pytest.approx((runs + pictures - rest) / 6)
    # Without the picture's own effect there is nothing but runs.
    changes[:, 1] -= 0.5
    alone = log_ratio(np.zeros((3, 2)), changes, np.arange(2), is_paired=True, between=9.0)
    assert alone is not None and (alone.variance, alone.samples_variance) == pytest.approx((runs / 6, 0.0))


@pytest.mark.parametrize(
    ("runs", "is_paired", "run_deviation", "picture_deviation"),
    [(5, True, 0.01, 0.0), (5, False, 0.01, 0.0), (5, True, 0.0, 0.0), (5, True, 0.01, 0.05), (1, False, 0.02, 0.05)],
)
def test_equal_sides_are_told_apart_as_rarely_as_the_level_says(
    runs: int, is_paired: bool, run_deviation: float, picture_deviation: float
) -> None:
    """500 comparisons of 8 pictures: 5 % are 25, and more than 40 have a chance of 0.001."""
    generator, called = np.random.default_rng(3), 0
    for _ in range(500):
        one, other = (
            generator.normal(0, 0.03, (runs, 8)) + generator.normal(0, run_deviation, (runs, 1)) for _ in range(2)
        )
        other = other + generator.normal(0, picture_deviation, 8)
        found = log_ratio(one, other, np.arange(8), is_paired=is_paired, between=0.02)
        assert found is not None
        low, high = found.interval(0.025)
        called += not low <= 1 <= high
    assert called <= 40


def test_equal_sides_are_found_the_same_as_often_as_said() -> None:
    ratio = LogRatio(0.0, 0.005**2, math.inf, 0.0)
    said = chance_of_same(ratio, 0.02, 0.025)
    drawn = np.random.default_rng(0).normal(0, 0.005, 20_000)
    inside = np.abs(drawn) + float(stats.norm.isf(0.025)) * 0.005 <= math.log(1.02)
    assert said == pytest.approx(inside.mean(), abs=0.01) and 0.9 < said < 1
    assert chance_of_same(LogRatio(0.0, 0.02**2, math.inf, 0.0), 0.02, 0.025) == 0
    assert chance_of_same(LogRatio(0.0, 0.0, math.inf, 0.0), 0.02, 0.025) == 1


def test_how_many_runs_find_equal_sides_the_same() -> None:
    # 4 pairs of runs that differ by 0.5 %: error 0.35 %, Student's t with 3 is 3.18, and 0.0198 / 0.0035 is 5.60.
    assert runs_for_same(0.005, 0.02, 0.025) == 4
    assert chance_of_same(LogRatio(0.0, 2 * 0.005**2 / 3, 2.0, 0.0), 0.02, 0.025) < 0.8
    assert runs_for_same(0.2, 0.02, 0.025) is None
