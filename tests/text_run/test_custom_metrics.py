"""A user's own metrics: what they get, what becomes of what they return, and what it costs when they fail."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiment_core_utils.g_metrics_inference import combine_inference_metrics
from experiment_core_utils.models.common.text_generation import results_of_records
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.text import InferenceResults, QueryRecord
from experiment_core_utils.text_run.custom_metrics import CustomMetric, find_custom_metrics, run_custom_metrics

MODULE = """
import numpy as np

not_a_function = 3


def words(results, metrics):
    texts = results["output_text"]
    return {
        "mean_words": np.float32(sum(len(text.split()) for text in texts) / len(texts)),
        "prompts": np.int64(metrics["num_prompts"]),
        "longest": max(texts, key=len),
        "any_empty": "" in texts,
        "judge": None,
    }


def vandal(results, metrics):
    results["queries"][0]["output_text"] = "changed"
    results["queries"].clear()
    metrics.clear()
    return {}


def broken(results, metrics):
    return {"ratio": 1 / 0}


def leaves(results, metrics):
    raise SystemExit("enough")


def a_list(results, metrics):
    return [1, 2]


def nested(results, metrics):
    return {"good": 1, "bad": {"a": 1}}


def infinite(results, metrics):
    return {"value": float("nan")}


def numbered(results, metrics):
    return {3: 1}
"""


@pytest.fixture(autouse=True)
def _user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_a_user").mkdir()
    (tmp_path / "of_a_user" / "measures.py").write_text(MODULE)
    (tmp_path / "of_a_user" / "more.py").write_text("def words(results, metrics):\n    return {}\n")
    (tmp_path / "torn.py").write_text("def words(:\n")
    (tmp_path / "angry.py").write_text("raise ZeroDivisionError('at import')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("of_a_user", "of_a_user.measures", "of_a_user.more"):
        sys.modules.pop(name, None)


def text_results() -> InferenceResults:
    queries = [
        QueryRecord(
            prompt_index=index,
            process_index=0,
            batch_index=0,
            input_tokens=1,
            output_tokens=2,
            ended=True,
            output_token_ids=[5, 6],
            output_text=text,
        )
        for index, text in enumerate(("red square", "a b c", ""))
    ]
    return results_of_records(queries, [], {"pad_token_id": 1}, 0, 1)


def report_of(*functions: str, results: InferenceResults | None = None) -> Any:
    results = results or text_results()
    found = find_custom_metrics([f"of_a_user.measures:{function}" for function in functions])
    return run_custom_metrics(found, results, combine_inference_metrics(results))


def test_columns_stand_under_the_functions_name_as_plain_values() -> None:
    report = report_of("words")
    columns = report["columns"]["words"]
    assert columns == {
        "mean_words": pytest.approx(5 / 3), "prompts": 3, "longest": "red square", "any_empty": True, "judge": None,
    }  # fmt: skip
    assert [type(value) for value in columns.values()] == [float, int, str, bool, type(None)]
    assert report["failures"] == []


def test_a_metric_that_fails_is_reported_and_costs_nothing_else() -> None:
    results = text_results()
    functions = ("vandal", "broken", "leaves", "a_list", "nested", "infinite", "numbered", "words")
    report = report_of(*functions, results=results)
    assert [query["output_text"] for query in results["queries"]] == ["red square", "a b c", ""]
    assert set(report["columns"]) == {"vandal", "words"}
    assert report["columns"]["words"]["prompts"] == 3
    assert report["columns"]["words"]["longest"] == "red square"
    assert [(failure["name"], failure["error"], failure["message"]) for failure in report["failures"]] == [
        ("of_a_user.measures:broken", "ZeroDivisionError", "division by zero"),
        ("of_a_user.measures:leaves", "SystemExit", "enough"),
        ("of_a_user.measures:a_list", "TypeError", "it returned list; return a mapping of column names to values"),
        (
            "of_a_user.measures:nested", "TypeError",
            "column bad is of type dict; give a number, text, True, False or None",
        ),
        ("of_a_user.measures:infinite", "ValueError", "column value is nan; give None where there is no value"),
        ("of_a_user.measures:numbered", "TypeError", "3 is not a column name; use text"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["of_nobody.measures:words"], r"of_nobody.measures:words cannot be imported \(ModuleNotFoundError: No module"),
        (["torn:words"], r"torn:words cannot be imported \(SyntaxError"),
        (["angry:words"], r"angry:words cannot be imported \(ZeroDivisionError: at import\)"),
        (["of_a_user.measures:missing"], "of_a_user.measures has no function missing"),
        (["of_a_user.measures:not_a_function"], "of_a_user.measures has no function not_a_function"),
        (["of_a_user.measures:words", "of_a_user.more:words"], "two functions named words"),
    ],
)
def test_what_cannot_be_found_is_a_configuration_error(names: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_custom_metrics(names)


def test_a_name_given_twice_counts_once() -> None:
    assert len(find_custom_metrics(["of_a_user.measures:words"] * 2)) == 1
    assert find_custom_metrics([]) == ()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"a": "x\0y"}, "NUL"),
        ({"a\0": 1}, "NUL"),
        ({"a": "\ud800"}, "surrogate"),
        ({"a": 2**63}, "beyond 64 bits"),
    ],
)
def test_what_no_table_holds_is_a_failure_of_the_metric_alone(returned: Any, message: str) -> None:
    metric = CustomMetric("my.metrics:odd", lambda results, metrics: returned)
    report = run_custom_metrics([metric], {}, {})  # type: ignore[typeddict-item]
    assert report["columns"] == {} and message in report["failures"][0]["message"]


def test_numpys_booleans_are_booleans() -> None:
    metric = CustomMetric("my.metrics:odd", lambda results, metrics: {"a": np.bool_(True)})
    assert run_custom_metrics([metric], {}, {})["columns"]["odd"]["a"] is True  # type: ignore[typeddict-item]
