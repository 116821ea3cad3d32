"""What is on a front, by hand and against each pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.statistics import on_front

figures = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("cost", "accuracy", "expected"),
    [
        ([1, 2, 3], [0.1, 0.2, 0.3], [True, True, True]),
        ([1, 2, 3], [0.3, 0.2, 0.1], [True, False, False]),
        # The same in one, worse in the other.
        ([1, 1], [0.2, 0.1], [True, False]),
        ([1, 2], [0.2, 0.2], [True, False]),
        # The same in both: neither is better.
        ([1, 1, 2], [0.2, 0.2, 0.2], [True, True, False]),
        ([5], [0.0], [True]),
    ],
)
def test_a_front_has_what_nothing_beats(cost: list[float], accuracy: list[float], expected: list[bool]) -> None:
    assert on_front(np.array(cost, dtype=float), np.array(accuracy)).tolist() == expected


@given(figures)
def test_no_setting_dominates_the_front_and_one_dominates_each_other(found: list[tuple[int, int]]) -> None:
    cost, accuracy = np.array(found, dtype=float).T
    is_on = on_front(cost, accuracy)
    assert is_on.any()
    for at in range(len(cost)):
        better = (cost <= cost[at]) & (accuracy >= accuracy[at]) & ((cost < cost[at]) | (accuracy > accuracy[at]))
        assert is_on[at] == (not better.any())
        assert is_on[at] or (better & is_on).any()


def test_each_draw_has_a_front_of_its_own() -> None:
    cost = np.array([[1.0, 2.0], [2.0, 1.0]])
    accuracy = np.array([[0.5, 0.4], [0.5, 0.4]])
    assert on_front(cost, accuracy).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("allowance", [0.0, 0.3])
def test_a_front_is_what_no_other_setting_dominates(allowance: float) -> None:
    random = np.random.default_rng(0)
    # Few values, so that many are equal; and some absent.
    cost, accuracy = random.integers(0, 6, (50, 12)).astype(float), random.integers(0, 4, (50, 12)) / 4
    cost[0, 3] = np.nan
    expected = [
        [
            not any(
                other * (1 + allowance) <= own and its >= right and (other * (1 + allowance) < own or its > right)
                for other, its in zip(costs, rights, strict=True)
            )
            for own, right in zip(costs, rights, strict=True)
        ]
        for costs, rights in zip(cost, accuracy, strict=True)
    ]
    assert on_front(cost, accuracy, allowance).tolist() == expected
