"""Exact match, strict and lenient, by hand and against recorded results of a public scorer."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.em import em, em_lenient, normalize_leniently
from tests.tasks.scoring.vectors import vectors


@pytest.mark.parametrize("row", vectors("em"))
def test_vector(row: dict[str, Any]) -> None:
    assert em(row["prediction"], row["references"]) == row["expected"]


@pytest.mark.parametrize(
    ("prediction", "reference", "strict", "lenient"),
    [
        ("3", "3", 1.0, 1.0),
        ("3.", "3", 0.0, 1.0),
        ("three", "3", 0.0, 1.0),
        ("Twenty!", "20", 0.0, 1.0),
        ("3.0", "3", 0.0, 1.0),
        ("3.5", "3", 0.0, 0.0),
        ("1,000", "1000", 0.0, 1.0),
        ("1,00", "100", 0.0, 0.0),
        ("1, 2", "12", 0.0, 0.0),
        ("(8)", "8", 0.0, 1.0),
        ('"8".', "8", 0.0, 1.0),
        ("The Dog.", "dog", 0.0, 1.0),
        ("a", "a", 1.0, 1.0),
        ('The "dog"', "dog", 0.0, 1.0),
        ("-1", "1", 0.0, 0.0),
        ("10+", "10", 0.0, 0.0),
        ("about 7", "7", 0.0, 0.0),
        ("There are two dogs.", "2", 0.0, 0.0),
    ],
)
def test_strict_and_lenient(prediction: str, reference: str, strict: float, lenient: float) -> None:
    assert em(prediction, [reference]) == strict
    assert em_lenient(prediction, [reference]) == lenient


@pytest.mark.parametrize("metric", [em, em_lenient])
def test_no_references_is_an_error(metric: Any) -> None:
    with pytest.raises(SampleError, match="at least one reference"):
        metric("3", [])


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_lenient_is_at_least_strict(prediction: str, references: list[str]) -> None:
    assert em(prediction, references) <= em_lenient(prediction, references)
    assert em_lenient(prediction, references) in (0.0, 1.0)


@given(st.text(), st.sampled_from(["3.", " The cat", "three"]))
def test_reference_itself_matches(prediction: str, reference: str) -> None:
    assert em_lenient(reference, [prediction, reference]) == 1.0


@settings(max_examples=1000, deadline=None)
@given(st.text("ab. \"'(,1", max_size=12))
def test_nothing_around_is_left(text: str) -> None:
    once = normalize_leniently(text)
    assert once == once.strip(" \"'(").rstrip(".,")


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("cafe\u0301", "café"),
        ("１２", "12"),
        ("it’s open", "it's open"),
        ("“stop”", "stop"),
        ("st\u200bop", "stop"),
        ("Ｓｔｏｐ", "stop"),
        ("−5", "-5"),
    ],
)
def test_what_looks_alike_is_alike_to_the_lenient_one_alone(prediction: str, reference: str) -> None:
    assert em(prediction, [reference]) == 0.0
    assert em_lenient(prediction, [reference]) == em_lenient(reference, [prediction]) == 1.0
    assert em_lenient(prediction, ["go"]) == 0.0
