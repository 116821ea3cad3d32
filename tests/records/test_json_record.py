"""Records that are put together of parts."""

import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.json_record import Record


class Speed(Record):
    ms: float
    note: str = ""


class Whole(Record):
    ms: float
    note: str
    joules: float


def test_parts_give_the_keys_that_they_have_set() -> None:
    found = Whole.of(Speed(ms=2.0), note="steady", joules=3.0)
    assert (found.ms, found.note, found.joules) == (2.0, "steady", 3.0)


def test_a_key_of_two_parts_is_refused() -> None:
    with pytest.raises(TypeError, match="Whole got ms from two parts"):
        Whole.of(Speed(ms=2.0), Speed(ms=3.0), note="", joules=3.0)


def test_a_record_that_cannot_be_is_refused_when_it_is_made() -> None:
    fast = Speed.of(ms=2.0)
    with pytest.raises(ResultsError, match="Speed is broken: ms is 'x', and it should be a valid number; the program"):
        Speed.of(ms="x")
    with pytest.raises(ResultsError, match="Whole lacks 'joules'"):
        Whole.of(fast, note="")
    with pytest.raises(ResultsError, match="Speed is broken: ms is inf"):
        fast.with_keys(ms=float("inf"))
    assert (fast.with_keys(ms=3.0).content(), fast.content()) == ({"ms": 3.0}, {"ms": 2.0})
