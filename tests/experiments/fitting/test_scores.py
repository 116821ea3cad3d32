"""Errors by hand."""

import numpy as np
import pytest

from experiments.fitting.scores import deviations, relative_error, score


def test_what_is_absent_or_not_above_0_has_no_deviation() -> None:
    nan = float("nan")
    found = deviations(np.array([11.0, 8.0, 3.0, nan, 1.0]), np.array([10.0, 10.0, nan, 1.0, 0.0]))
    assert found.tolist() == pytest.approx([0.1, -0.2])


def test_relative_error_by_hand() -> None:
    # 10 % over, 20 % under, one that is absent.
    measured = np.array([10.0, 10.0, np.nan])
    assert relative_error(np.array([11.0, 8.0, 3.0]), measured) == pytest.approx(0.15)
    assert relative_error(None, measured) == float("inf")


def test_a_score_by_hand() -> None:
    # + 5 %, - 20 %, + 50 %.
    found = score(np.array([1.05, 0.8, 3.0]), np.array([1.0, 1.0, 2.0]))
    assert found is not None and (found.n, found.hit_rate) == (3, pytest.approx(1 / 3))
    assert (found.mape, found.bias) == (pytest.approx(0.25), pytest.approx(0.35 / 3))
    assert score(np.array([]), np.array([])) is None
