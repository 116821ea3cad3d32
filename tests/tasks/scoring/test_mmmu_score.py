"""MMMU's open answers by hand and against recorded results; its choices are tested with `mc` and with the metrics."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.mmmu_score import mmmu_open_score
from tests.tasks.scoring.vectors import vectors


@pytest.mark.parametrize("row", vectors("mmmu_score"))
def test_vector(row: dict[str, Any]) -> None:
    assert mmmu_open_score(row["prediction"], row["references"]) == row["expected"]


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("24", "24", 1.0),
        ("24", "2", 0.0),
        ("$1,234.50", "1234.5", 1.0),
        ("-3", "3", 0.0),
        ("1e3", "1000", 1.0),
        ("0.336", "0.34", 1.0),  # both to two decimals
        (".5", "0.5", 1.0),
        ("It is 3 of 7", "7", 1.0),  # any number in a candidate
        ("24 is not it\nthe result is 25", "24", 0.0),  # the candidate is what is behind the lead
        ("24 is not it\nthe result is 25", "25", 1.0),
        ("the answer is 24 so 7", "24", 0.0),  # the shortest of "24 so 7" and "7"
        ("the answer is 24 so 7", "7", 1.0),
        ("x = 5\nso = 6", "5", 0.0),  # "=" leads in the last line only; there "6"
        ("Mitosis, of course", "mitosis", 1.0),
        ("ionization", "ion", 1.0),  # inside a word, as the benchmark's script has it
        ("ion", "ionization", 0.0),
        ("pixel", "x", 0.0),  # one character must stand beside a space
        ("axis x here", "x", 1.0),
        ("x", "x", 1.0),
        ("", "x", 0.0),
        ("anything", "", 0.0),
    ],
)
def test_by_hand(prediction: str, reference: str, expected: float) -> None:
    assert mmmu_open_score(prediction, [reference]) == expected


def test_any_reference_will_do_and_none_is_an_error() -> None:
    assert mmmu_open_score("osmosis", ["diffusion", "osmosis"]) == 1.0
    with pytest.raises(SampleError, match="at least one reference"):
        mmmu_open_score("24", [])


@given(st.text(), st.text(min_size=1))
def test_wild_texts_score_0_or_1_and_always_the_same(prediction: str, reference: str) -> None:
    value = mmmu_open_score(prediction, [reference])
    assert value in (0.0, 1.0)
    assert value == mmmu_open_score(prediction, [reference])


@given(st.integers(-(10**9), 10**9))
def test_a_number_fits_itself_grouped_or_not(number: int) -> None:
    assert mmmu_open_score(f"The answer is {number:,}.", [str(number)]) == 1.0
