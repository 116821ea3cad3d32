"""Lines through points by hand, recovery of known coefficients, and what their intervals count."""

import numpy as np
import pytest

from experiments.analyses.stages.scaling import fit_line, known_line


def test_a_line_by_hand() -> None:
    # Means 2 and 4; slope (1 * 2 + 0 + 1 * 1) / 2 = 1.5; residuals 2 - 2.5, 5 - 4, 5 - 5.5.
    fit, reason = fit_line([1, 2, 3], [2, 5, 5], [["a", "b", "c"]])
    assert fit is not None and reason is None
    assert (fit.slope, fit.intercept) == (pytest.approx(1.5), pytest.approx(1.0))
    assert fit.residual_std == pytest.approx(1.5**0.5)
    assert fit.r2 == pytest.approx(1 - 1.5 / 6)
    assert (fit.n, fit.num_clusters, fit.x_min, fit.x_max, fit.at(2)) == (3, 3, 1, 3, pytest.approx(4))


def test_known_coefficients_are_inside_the_intervals() -> None:
    generator = np.random.default_rng(1)
    pictures = [number for number in range(60) for _ in range(4)]
    x = generator.uniform(200, 2000, len(pictures))
    y = 12.5 + 0.03 * x + generator.normal(0, 1, 60).repeat(4) + generator.normal(0, 0.5, len(pictures))
    fit, _ = fit_line(x, y, [pictures])
    assert fit is not None and fit.slope_ci95 is not None and fit.intercept_ci95 is not None
    assert fit.slope_ci95[0] < 0.03 < fit.slope_ci95[1] < 0.031
    assert fit.intercept_ci95[0] < 12.5 < fit.intercept_ci95[1]
    assert fit.r2 is not None and fit.r2 > 0.99


def test_points_of_one_cluster_are_not_independent() -> None:
    generator = np.random.default_rng(2)
    x = generator.uniform(0, 1, 20).repeat(10)
    y = x + generator.normal(0, 1, 20).repeat(10)
    alone, _ = fit_line(x, y, [range(200)])
    together, _ = fit_line(x, y, [[number // 10 for number in range(200)]])
    both, _ = fit_line(x, y, [range(200), [number // 10 for number in range(200)]])
    assert alone is not None and together is not None and both is not None
    assert alone.slope_ci95 is not None and together.slope_ci95 is not None and both.slope_ci95 is not None
    # 10 copies of each point: the interval of those who count copies is about 10^0.5 = 3.2 times too narrow.
    width = (together.slope_ci95[1] - together.slope_ci95[0]) / (alone.slope_ci95[1] - alone.slope_ci95[0])
    assert 2.3 < width < 4.3
    assert both.slope_ci95 == pytest.approx(together.slope_ci95) and both.num_clusters == 20


def test_without_spread_there_is_no_line_and_without_clusters_no_interval() -> None:
    assert fit_line([1, 2], [1, 2], [[0, 1]]) == (None, "2 points; a line with its scatter needs at least 3")
    assert fit_line([4, 4, 4], [1, 2, 3], [[0, 1, 2]]) == (None, "all points have the same x (4)")
    fit, _ = fit_line([1, 2, 3], [1, 2, 3], [["a", "a", "a"]])
    assert fit is not None and fit.slope_ci95 is None and "one cluster" in (fit.reason or "")


def test_without_a_span_there_is_no_slope() -> None:
    """Prompts of 41 and 42 tokens, 7 ms apart by chance: no slope of 7 ms a token, and 1.5 times as long is enough."""
    x, y, pictures = [42, 41, 42, 41], [27, 20, 28, 21], [["a", "b", "c", "d"]]
    reason = "x is 41 to 42, and a slope takes 1.5 times the smallest x"
    assert fit_line(x, y, pictures) == (None, reason) == known_line(x, y, pictures)
    assert fit_line([0, 3, 3], [1, 2, 3], [[0, 1, 2]])[0] is not None
    assert fit_line([2, 3, 3], [1, 2, 3], [[0, 1, 2]])[0] is not None
    assert fit_line([3, 2.01, 3], [1, 2, 3], [[0, 1, 2]])[0] is None


def test_a_slope_that_is_not_known_within_a_half_of_it_is_not_given() -> None:
    generator = np.random.default_rng(3)
    x = generator.uniform(100, 1000, 40)
    noise = generator.normal(0, 1, 40)
    # The error of the slope is about 1 / (260 * 40^0.5) = 0.0006 for noise of 1: the interval is +-0.0012.
    known, reason = known_line(x, 0.01 * x + noise, [range(40)])
    assert known is not None and reason is None
    fit, reason = known_line(x, 0.0015 * x + noise, [range(40)])
    assert fit is None and reason is not None and "wider than the slope" in reason
    fit, reason = known_line(x, 0.01 * x + noise, [["a"] * 40])
    assert fit is None and reason == "no interval: all points belong to one cluster"


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="3, 3, 2 points do not fit together"):
        fit_line([1, 2, 3], [1, 2, 3], [[0, 1]])
    with pytest.raises(ValueError, match="not finite"):
        fit_line([1, 2, float("nan")], [1, 2, 3], [[0, 1, 2]])
