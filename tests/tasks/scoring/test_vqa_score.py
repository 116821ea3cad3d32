"""VQA accuracy against hand-worked numbers and against recorded results of public scorers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.anls import anls
from experiment_core_utils.tasks.scoring.em import em, em_lenient
from experiment_core_utils.tasks.scoring.mmmu_score import mmmu_open_score
from experiment_core_utils.tasks.scoring.vqa_score import vqa_normalize, vqa_score, vqa_score_molmo

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "metric_vectors_vqa.json").read_text(encoding="utf-8")
)


def _of(metric: str) -> list[Any]:
    rows = [row for row in VECTORS if row["metric"] == metric]
    return [pytest.param(row, id=row.get("case") or repr(row["prediction"])) for row in rows]


@pytest.mark.parametrize("score", [vqa_score, vqa_score_molmo, em, em_lenient, anls, mmmu_open_score])
def test_references_may_come_first_as_in_the_published_call(score: Any) -> None:
    answers = ["stop", "go", "stop", "halt", "go on"]
    assert score(answers, "stop") == score("stop", answers) == score("stop", tuple(answers)) > 0
    assert score(["go"] * 3, "stop") == 0
    for pair in (("stop", "stop"), (answers, answers)):
        with pytest.raises(SampleError, match=f"{score.__name__} compares a text with a list of reference answers"):
            score(*pair)


def test_the_published_call_counts_the_annotators() -> None:
    # Two of five agree: 2/5 of the ways leave one of them, the others both.
    assert vqa_score(["a b", "c", "a b", "d", "e"], "A b.") == pytest.approx(2 / 5 * 1 / 3 + 3 / 5 * 2 / 3)


@pytest.mark.parametrize("row", _of("vqa_normalize"))
def test_normalize_vector(row: dict[str, Any]) -> None:
    assert vqa_normalize(row["prediction"]) == row["expected"]


@pytest.mark.parametrize("row", _of("vqa_score"))
def test_score_vector(row: dict[str, Any]) -> None:
    assert vqa_score(row["prediction"], row["references"]) == pytest.approx(row["expected"], abs=1e-9)


@pytest.mark.parametrize("row", _of("vqa_score_molmo"))
def test_molmo_vector(row: dict[str, Any]) -> None:
    assert vqa_score_molmo(row["prediction"], row["references"]) == pytest.approx(row["expected"], abs=1e-9)


@pytest.mark.parametrize(
    ("matching", "expected", "expected_molmo"),
    [
        (0, 0.0, 0.0),
        (1, 0.3, 1 / 3),  # (1 * 0/3 + 9 * 1/3) / 10
        (2, 0.6, 2 / 3),  # (2 * 1/3 + 8 * 2/3) / 10
        (3, 0.9, 1.0),  # (3 * 2/3 + 7 * 1) / 10
        (4, 1.0, 1.0),
        (10, 1.0, 1.0),
    ],
)
def test_ten_annotators(matching: int, expected: float, expected_molmo: float) -> None:
    references = ["cat"] * matching + ["dog"] * (10 - matching)
    assert vqa_score("cat", references) == pytest.approx(expected)
    assert vqa_score_molmo("cat", references) == pytest.approx(expected_molmo)


def test_unanimous_references_are_normalised_too() -> None:
    assert vqa_score("Yes.", ["yes"] * 10) == 1.0


def test_single_reference_is_zero_when_left_out() -> None:
    assert vqa_score("cat", ["cat"]) == 0.0
    assert vqa_score_molmo("cat", ["cat"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one, two", "1 2"),
        ("1,000-ft", "1000ft"),
        ("5.", "5"),
        (".5", ".5"),
        ("couldnt've", "couldn't've"),
        ("yalls", "yalls"),
        ("what's-that", "what's that"),
    ],
)
def test_normalize_by_hand(text: str, expected: str) -> None:
    assert vqa_normalize(text) == expected


def test_no_references_is_an_error() -> None:
    with pytest.raises(SampleError, match="at least one reference"):
        vqa_score("cat", [])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["cat", "Cat.", "dog", "two", "2"]), min_size=1, max_size=12), st.sampled_from("cat 2 x")
)
def test_equals_the_definition_by_enumeration(references: list[str], prediction: str) -> None:
    hits = [vqa_normalize(reference) == vqa_normalize(prediction) for reference in references]
    ways = [min((sum(hits) - hit) / 3, 1.0) for hit in hits]
    assert vqa_score(prediction, references) == pytest.approx(sum(ways) / len(ways))
