"""Records that are put together of parts."""

import pytest

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
