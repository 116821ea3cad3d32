import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.distributions import bounded_mean_interval, describe


def test_four_numbers_by_hand() -> None:
    spread = describe([1.0, 2.0, 3.0, 6.0])
    assert spread is not None
    assert (spread.n, spread.mean, spread.min, spread.max) == (4, 3.0, 1.0, 6.0)
    # Squares of the differences: 4 + 1 + 0 + 9 = 14; divided by n - 1 = 3.
    assert spread.std == pytest.approx(math.sqrt(14 / 3))
    # Positions from 0 to 3: 1.5 for the median, 2.85 for P95 (3 + 0.85 * 3), 2.97 for P99.
    assert spread.p50 == pytest.approx(2.5)
    assert spread.p95 == pytest.approx(5.55)
    assert spread.p99 == pytest.approx(5.91)
    # Student's t with 3 degrees of freedom, 97.5 %: 3.182446.
    half = 3.182446 * math.sqrt(14 / 3) / 2
    assert spread.ci_low == pytest.approx(3 - half, rel=1e-6)
    assert spread.ci_high == pytest.approx(3 + half, rel=1e-6)


def test_one_number_has_no_spread_and_none_has_nothing() -> None:
    single = describe([5.0])
    assert single is not None
    assert (single.mean, single.std, single.ci_low, single.ci_high) == (5.0, None, None, None)
    assert describe([]) is None
    assert bounded_mean_interval([]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        describe([1.0, value])


def test_wilson_by_hand() -> None:
    # 8 of 10: z = 1.959964, z^2 = 3.841459; centre (0.8 + 0.192073) / 1.384146 = 0.716740.
    interval = bounded_mean_interval([1.0] * 8 + [0.0] * 2)
    assert interval == pytest.approx((0.490162, 0.943318), abs=1e-5)


def test_all_right_is_not_certain() -> None:
    low, high = bounded_mean_interval([1.0] * 16) or (0.0, 0.0)
    assert 0.75 < low < 0.85
    assert high == 1.0


@given(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), min_size=1, max_size=60))
def test_the_interval_holds_the_mean_and_stays_inside(scores: list[float]) -> None:
    low, high = bounded_mean_interval(scores) or (1.0, 0.0)
    assert 0.0 <= low <= np.mean(scores) + 1e-9
    assert np.mean(scores) - 1e-9 <= high <= 1.0


def test_the_bootstrap_covers_the_true_mean() -> None:
    source = np.random.default_rng(3)
    scores, shares = np.array([0.0, 0.3, 1.0]), np.array([0.3, 0.2, 0.5])
    truth = float(scores @ shares)
    hits = 0
    for _ in range(200):
        low, high = bounded_mean_interval(list(source.choice(scores, size=80, p=shares))) or (1.0, 0.0)
        hits += low <= truth <= high
    assert hits >= 180
