"""Verdicts on percentiles: by hand, and how often equal settings are called different."""

import numpy as np
import pytest
from scipy import stats

from experiments.fitting.verdicts import TAIL, fewest_for, first_of_each, tail_interval, tail_p_values

PERCENT = {"p95": 95.0, "p99": 99.0}


def equal_pairs(statistic: str, n: int, num_pairs: int, seed: int, is_alike: bool) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal times [num_pairs, n] of two settings with the same percentile, paired by sample, correlated by 0.5."""
    normal = np.random.default_rng(seed).multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=(num_pairs, n))
    times = []
    for side, spread in enumerate((0.5, 0.5) if is_alike else (0.75, 0.25)):
        times.append(np.exp(spread * (normal[..., side] - float(stats.norm.ppf(PERCENT[statistic] / 100)))))
    return times[0], times[1]


def wrong_verdicts(statistic: str, n: int, num_pairs: int, seed: int, *, is_alike: bool = True) -> float:
    """Fraction of pairs of the same percentile in which the first is called cheaper; 0 below the fewest pictures."""
    percent = PERCENT[statistic]
    if n < fewest_for(percent):
        return 0.0
    ones, others = equal_pairs(statistic, n, num_pairs, seed, is_alike)
    return float(
        np.mean([tail_p_values(*pair, percent)[0] <= TAIL for pair in zip(ones, others[:, None], strict=True)])
    )


def test_the_fewest_pictures_by_hand() -> None:
    # 0.95^85 = 0.0128 and 0.95^86 = 0.0121, with half of the level of 2.5 %; 0.99^436 = 0.01251, 0.99^437 = 0.01238.
    assert (fewest_for(None), fewest_for(95), fewest_for(99)) == (6, 86, 437)


@pytest.mark.parametrize(("pictures", "is_lower"), [(85, False), (86, True)])
def test_a_percentile_is_shown_lower_from_the_fewest_pictures_on(pictures: int, is_lower: bool) -> None:
    one = np.linspace(1.0, 2.0, pictures)
    p_values = tail_p_values(one, np.stack([one + 5, one, one - 5]), 95)
    assert (p_values[0] <= 0.025) == is_lower
    assert p_values[1:].tolist() == [1.0, 1.0]


def test_the_p_value_of_a_percentile_by_hand() -> None:
    # 100 pairs; all of the other's times are above all of one's. The 95 of one may be above its highest time with
    # 0.95^100, over the half of the level that this may fail with; at any lower place many pairs say the same.
    one = np.arange(100.0)
    assert tail_p_values(one, one[None] + 1000, 95)[0] == pytest.approx(0.95**100 / 0.5)
    # Above the highest of one are 4 of the other, and no pair says otherwise: 0.5^4, over 0.4 of the level; below it,
    # fewer pairs are parted. 1 of 100 above is likely enough.
    other = one.copy()
    other[:4] = 200.0
    assert tail_p_values(one, other[None], 95)[0] == pytest.approx(0.5**4 / 0.4)


def test_the_interval_of_a_percentile_is_two_order_statistics() -> None:
    # 0.95^71 = 0.0262 and 0.95^72 = 0.0249.
    assert tail_interval(np.arange(71.0), 95) is None
    low, high = tail_interval(np.arange(1.0, 101.0), 95) or (0.0, 0.0)
    # At most 90 of 100 below with 0.0282, at most 89 with 0.0115; 99 or more with 0.0371, all with 0.0059.
    assert (low, high) == (90.0, 100.0)


def test_the_first_sample_of_each_picture() -> None:
    assert first_of_each(["b", "a", "b", "c", "a"]).tolist() == [0, 1, 3]


@pytest.mark.parametrize("statistic", ["p95", "p99"])
@pytest.mark.parametrize("n", [10, 20, 50, 200])
def test_equal_settings_are_called_different_no_more_often_than_stated(statistic: str, n: int) -> None:
    """Of 400 pairs 10 are expected at 2.5 %, and 20 or more with a probability of 0.3 %."""
    assert wrong_verdicts(statistic, n, 400, seed=1) * 400 < 20


@pytest.mark.parametrize(("statistic", "n"), [("p95", 100), ("p99", 450)])
def test_percentiles_hold_their_level_where_they_allow_a_verdict(statistic: str, n: int) -> None:
    assert wrong_verdicts(statistic, n, 200, seed=2, is_alike=False) * 200 < 13
