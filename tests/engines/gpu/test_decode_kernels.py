"""The decode step's kernels, in Triton's interpreter: what the modules compute, in float32."""

import json
from typing import Any

import pytest

from tests.engines.interpreter import printed_by


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(printed_by("tests.engines.interpreted_decode"))


def test_a_step_is_the_modules_step(results: Any) -> None:
    """Top-3 in blocks 1 and 3 and the model's own top-4 in block 0; logits are of the order of 4."""
    assert results["plain"]["worst"] < 1e-5
    assert results["plain"]["same"]
    assert results["plain"]["lengths"] == [8 + 2]


def test_requests_of_several_lengths_with_grouped_heads_and_odd_widths(results: Any) -> None:
    assert results["grouped"]["worst"] < 1e-5
    assert results["grouped"]["same"]
    assert results["grouped"]["lengths"] == [1 + 1, 7 + 1]


def test_requests_together_are_the_modules_one_by_one(results: Any) -> None:
    """Five of lengths 1 to 8 over two steps; then heads that share keys, 10 of 150 experts and odd widths."""
    assert max(results["together"]["worst"], results["grouped together"]["worst"]) < 1e-5
    assert results["together"]["same"] and results["grouped together"]["same"]
    assert results["together"]["lengths"] == [8 + 2, 1 + 2, 5 + 2, 3 + 2, 8 + 2]
    assert results["grouped together"]["lengths"] == [1 + 1, 7 + 1]


def test_requests_that_share_weights_note_the_same_experts(results: Any) -> None:
    for case in ("together", "grouped together"):
        assert results[case]["used"] == results[case]["routed"]
    assert [len(ids) for ids in results["together"]["used"][0].values()] == [5, 5, 5]


def test_a_weight_is_shared_by_more_rows_than_a_program_takes(results: Any) -> None:
    assert results["many"]["worst"] < 1e-4
    assert results["many"]["best"] < 1e-4
    assert results["many"]["rows"]


@pytest.mark.parametrize("case", ["plain", "grouped"])
def test_the_experts_that_are_noted_are_those_with_the_largest_logits(results: Any, case: str) -> None:
    """Of blocks 0, 1 and 3 of 4, or 0 and 2; the others note nothing."""
    assert results[case]["used"] == results[case]["routed"]
    noted = [[len(ids) for ids in step.values()] for step in results[case]["used"]]
    assert noted == ([[1, 1, 1]] * 2 if case == "plain" else [[2, 2]])
    widths = {block: [len(row) for row in ids] for block, ids in results[case]["used"][0].items()}
    assert widths == ({"0": [4], "1": [3], "3": [3]} if case == "plain" else {"0": [4, 4], "2": [10, 10]})


def test_of_equal_logits_the_lowest_index_comes_first(results: Any) -> None:
    assert results["equal"]["topk_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert results["equal"]["topk_weights"] == [0.125] * 8
    assert results["equal"]["token"] == [0]
    assert results["equal"]["together"] == [[[0, 1, 2, 3], [0, 1, 2, 3]], [0, 0]]


def test_of_equal_logits_of_many_experts_too(results: Any) -> None:
    """The first four are ranked alone; weights are made to sum to 1."""
    found = results["equal of many"]
    assert (found["topk_ids"][:4], found["topk_weights"][:4]) == ([0, 1, 2, 3], [0.25] * 4)
    assert found["together"] == [[[0, 1, 2, 3], [0, 1, 2, 3]], [0, 0]]


@pytest.mark.parametrize("step", ["", " together"])
def test_a_token_whose_logit_is_not_finite_is_marked(results: Any, step: str) -> None:
    """The step after it reads a token all the same."""
    found = results["checked"]
    assert found[f"finite{step}"][0] == found[f"finite{step}"][1]
    for case in ("infinite", "nan"):
        tokens, checked = found[f"{case}{step}"]
        assert checked == [-1, -1] and all(0 <= token < found["rows"] for token in tokens)
