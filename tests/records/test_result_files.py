"""Faults of results files, in words of the file."""

import pytest
from pydantic import ValidationError

from experiment_core_utils.records.json_record import Record
from experiment_core_utils.records.result_files import field_fault


class Part(Record):
    name: str


class Whole(Record):
    part: Part


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"part": 3}, "is broken: part is 3, and it should be an object"),
        ({"part": {"name": 3}}, "is broken: part.name is 3, and it should be a valid string"),
        ({"part": {}}, "lacks 'name' in part: it is broken or something else"),
    ],
)
def test_a_fault_names_the_field_and_no_class_of_ours(content: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(content)
    assert field_fault(caught.value) == words
