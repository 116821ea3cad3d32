"""ANLS by hand and against recorded results of the competition's script."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.anls import anls
from experiment_core_utils.tasks.scoring.em import em
from tests.tasks.scoring.vectors import vectors


@pytest.mark.parametrize("row", vectors("anls"))
def test_vector(row: dict[str, Any]) -> None:
    assert anls(row["prediction"], row["references"]) == pytest.approx(row["expected"], abs=1e-9)


@pytest.mark.parametrize("row", vectors("ansl_em"))
def test_both_vector(row: dict[str, Any]) -> None:
    pair = row["prediction"], row["references"]
    assert {"anls": anls(*pair), "em": em(*pair)} == pytest.approx(row["expected"], abs=1e-9)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("hallo", ["hello"], 1 - 1 / 5),
        ("HELLO", ["hello"], 1.0),
        ("ac", ["ab"], 0.5),  # 1 - 1/2: exactly one half counts
        ("abcxy", ["abcde"], 1 - 2 / 5),
        ("abxyz", ["abcde"], 0.0),  # 1 - 3/5 is below one half
        ("ab", ["abcd"], 0.5),
        ("ab", ["abcde"], 0.0),  # three more characters of five
        ("  new   york ", ["new york"], 1.0),
        ("  hallo  ", ["hello"], 1 - 1 / 5),  # the prediction is stripped before its length counts
        ("newyork", ["new york"], 1 - 1 / 8),
        ("b", ["  a  "], 1 - 1 / 5),  # the length is that of the reference as it stands
        ("ß", ["a"], 1 - 1 / 2),  # "SS" in upper case: one edit in a length of 2; in lower case it would be 1 in 1
        ("cat", ["dog", "cart", "ca"], 1 - 1 / 4),  # the nearest: one edit in four characters
        ("", [""], 1.0),
        ("", ["a"], 0.0),
        ("a", [""], 0.0),
    ],
)
def test_by_hand(prediction: str, references: list[str], expected: float) -> None:
    assert anls(prediction, references) == pytest.approx(expected)


def test_no_references_is_an_error() -> None:
    with pytest.raises(SampleError, match="at least one reference"):
        anls("a", [])


def test_runaway_answer_costs_little() -> None:
    runaway = "lorem ipsum " * 417
    started = time.process_time()
    assert anls(runaway, ["invoice 42"] * 10) == 0.0
    assert time.process_time() - started < 0.1  # about 1 ms; the whole distances would take seconds
    assert anls(runaway, [runaway[:-300]]) == pytest.approx(1 - 299 / len(runaway.strip()), abs=2e-3)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_wild_texts_stay_in_range(prediction: str, references: list[str]) -> None:
    value = anls(prediction, references)
    assert value == 0.0 or 0.5 <= value <= 1.0
    assert value == max(anls(prediction, [reference]) for reference in references)
    assert anls(references[0].strip(), [references[0].strip()]) == 1.0
