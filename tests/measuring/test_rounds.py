"""The order of settings in rounds, worked out by hand, and what the rounds show of the machine."""

from collections import Counter
from itertools import pairwise

import pytest

from experiment_core_utils.measuring.rounds import RoundOrder, RoundsSeen, common_factor, williams_rows


def test_rows_of_four_are_those_of_williams() -> None:
    # Behind 0 come 1, 3, 2: steps of +1, -2, +3 modulo 4; each further row adds 1.
    assert williams_rows(4) == ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
    assert williams_rows(3) == ((0, 1, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0), (0, 2, 1), (1, 0, 2))


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_each_stands_equally_often_in_each_place_and_behind_each_other_one(size: int) -> None:
    rows = williams_rows(size)
    places = Counter((place, value) for row in rows for place, value in enumerate(row))
    pairs = Counter(pair for row in rows for pair in pairwise(row))
    assert len(places) == size**2 and len(set(places.values())) == 1
    assert len(pairs) == size * (size - 1) and len(set(pairs.values())) == 1


def test_an_order_is_balanced_over_a_cycle_drawn_by_the_seed_and_leaves_out_what_is_not_due() -> None:
    keys = ("a", "b", "c", "d")
    order = RoundOrder(keys, 3)
    rows = [order.of_round(number, keys) for number in range(8)]
    for cycle in (rows[:4], rows[4:]):
        assert Counter(each for row in cycle for each in pairwise(row)) == {
            (one, other): 1 for one in keys for other in keys if one != other
        }
    assert rows == [RoundOrder(keys, 3).of_round(number, keys) for number in range(8)]
    assert rows != [RoundOrder(keys, 4).of_round(number, keys) for number in range(8)]
    assert rows[:4] != rows[4:]
    assert order.of_round(2, {"d", "a"}) == tuple(each for each in rows[2] if each in "ad")


def test_a_common_factor_is_the_geometric_mean_over_what_both_rounds_have() -> None:
    before = {("a", 1): 1.0, ("b", 1): 4.0, ("c", 1): 1.0}
    assert common_factor(before, {("a", 1): 2.0, ("b", 1): 2.0}) == pytest.approx(1.0)
    assert common_factor(before, {("a", 1): 2.0, ("b", 1): 8.0, ("d", 1): 9.0}) == pytest.approx(2.0)
    assert common_factor(before, {("a", 2): 2.0}) is None


def test_the_trace_has_the_lowest_and_the_highest_factor_of_further_rounds() -> None:
    seen = RoundsSeen(switches_s=[0.1, 0.3, 0.2])
    seen.add([{("a", 1): 1.0}, {("a", 1): 1.1}, {("a", 1): 0.9}])
    seen.add([{("a", 2): 2.0}, {("a", 2): 2.1}, {("a", 2): 2.0}])
    assert seen.first == {("a", 1): 1.0}
    trace = seen.trace("0001", 0, 1, 7, 1)
    assert (trace.num_rounds, trace.switch_s, trace.seed, trace.closing_factor) == (6, 0.2, 7, None)
    assert trace.factors == pytest.approx((0.9, 1.1))
    assert RoundsSeen().trace("0001", 0, 1, 7, 1).factors is None
