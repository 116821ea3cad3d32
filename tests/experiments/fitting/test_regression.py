"""Coefficients of small systems by hand; values that stand out do not pull the robust fit."""

import numpy as np
import pytest

from experiments.fitting.regression import relative_nonnegative, robust_nonnegative


def test_relative_least_squares_by_hand() -> None:
    # 2 + 3 x exactly, with a column of zeros and one of another magnitude.
    x = np.array([1.0, 2.0, 4.0])
    columns = np.stack([np.ones(3), 1e9 * x, np.zeros(3)], axis=1)
    assert relative_nonnegative(columns, 2 + 3 * x, scaled=True).tolist() == pytest.approx(
        [2.0, 3e-9, 0.0], rel=1e-9, abs=1e-12
    )
    # A constant c for 1 and 3: (c - 1)^2 + (c / 3 - 1)^2 is least at c = (1 + 1 / 3) / (1 + 1 / 9).
    assert relative_nonnegative(np.ones((2, 1)), np.array([1.0, 3.0])) == pytest.approx([1.2])
    # Two columns that say the same: the larger one takes all as they are.
    twins = np.stack([np.ones(3), np.full(3, 4.0)], axis=1)
    assert relative_nonnegative(twins, np.full(3, 8.0)) == pytest.approx([0.0, 2.0])
    # y falls with x: the slope is 0, and c = sum(1 / y) / sum(1 / y^2) = (11 / 6) / (49 / 36).
    falling = relative_nonnegative(np.stack([np.ones(3), x], axis=1), np.array([3.0, 2.0, 1.0]))
    assert falling == pytest.approx([66 / 49, 0.0])


def test_least_squares_by_hand() -> None:
    # y = 1 + 2 x exactly.
    x = np.array([1.0, 2.0, 4.0])
    assert robust_nonnegative(np.stack([np.ones(3), x], axis=1), 1 + 2 * x) == pytest.approx([1.0, 2.0])
    # y falls with x: the slope would be negative, so it is 0 and the constant is the mean of 3, 2 and 1.
    assert robust_nonnegative(np.stack([np.ones(3), x], axis=1), np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_one_sample_in_ten_that_took_thrice_as_long_hardly_counts() -> None:
    x = np.linspace(1.0, 2.0, 40)
    target = 1.0 + 2.0 * x + 0.01 * np.sin(7.0 * x)
    target[::10] *= 3
    found = robust_nonnegative(np.stack([np.ones(40), x], axis=1), target)
    assert found == pytest.approx([1.0, 2.0], abs=0.05)
