"""The short answer in an output, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.tasks.scoring.em import molmo_answer


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("  a   red\tcar ", "a red car"),
        ("Because. Answer: 6 Answer: 7", "6"),
        ("4\n5\n5", "5"),
        ("4\n5", "4"),
        ("\n\n\n7", "7"),
        ("Answer: 6\n6\n7", "6"),
        ("answer: 6", "answer: 6"),
        ("Answer:", ""),
        ("", ""),
    ],
)
def test_by_hand(prediction: str, expected: str) -> None:
    assert molmo_answer(prediction) == expected


@given(st.text())
def test_is_one_tidy_line_of_the_output(prediction: str) -> None:
    answer = molmo_answer(prediction)
    assert answer == " ".join(answer.split())
    assert set(answer.split()) <= set(prediction.replace("Answer:", " ").split())
