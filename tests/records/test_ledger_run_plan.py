"""The plan of a run on the disk."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.ledger import (
    PARTS_FOLDER,
    PLAN_VERSION,
    RunPlan,
    folders_with_plans,
    read_plan,
    write_plan,
)

PLAN = RunPlan(PLAN_VERSION, None, "f00d", "signs", ("a", "b"), ("b",), 4, 2, 1, 1000.5)


def test_a_plan_comes_back_as_it_was_and_the_last_one_counts(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "new")
    assert read_plan(tmp_path / "new") == PLAN
    later = replace(PLAN, experiment_id="0002")
    write_plan(later, tmp_path / "new")
    assert read_plan(tmp_path / "new") == later
    assert [path.name for path in (tmp_path / "new" / PARTS_FOLDER).iterdir()] == ["plan.json"]


def test_the_folder_itself_and_those_in_it_have_plans(tmp_path: Path) -> None:
    for place in (tmp_path / "vqa", tmp_path / "charts", tmp_path / "vqa" / "deeper"):
        write_plan(PLAN, place)
    (tmp_path / "nothing").mkdir()
    assert folders_with_plans(tmp_path) == [tmp_path / "charts", tmp_path / "vqa"]
    write_plan(PLAN, tmp_path)
    assert folders_with_plans(tmp_path) == [tmp_path, tmp_path / "charts", tmp_path / "vqa"]


@pytest.mark.parametrize("content", ["", "{}", '{"keys": 3}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / PARTS_FOLDER).mkdir()
    (tmp_path / PARTS_FOLDER / "plan.json").write_text(content)
    with pytest.raises(ResultsError, match="is not a plan of this version; begin the run again"):
        read_plan(tmp_path)


def test_a_plan_of_another_schema_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="contains no plan of a run"):
        read_plan(tmp_path)
    write_plan(replace(PLAN, schema_version=7), tmp_path)
    with pytest.raises(ResultsError, match=r"is not a plan of schema 1 \(its schema is 7\); begin"):
        read_plan(tmp_path)


@pytest.mark.parametrize("field", ["num_samples", "num_samples_before", "num_processes"])
@pytest.mark.parametrize("count", [-(10**30), -1, 10**30])
def test_counts_that_no_run_has_are_refused(tmp_path: Path, field: str, count: int) -> None:
    write_plan(PLAN, tmp_path)
    path = tmp_path / PARTS_FOLDER / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: count}))
    with pytest.raises(ResultsError, match="is broken: its numbers cannot be those of a run"):
        read_plan(tmp_path)
