"""Which settings a run still owes."""

import json
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.settings import SettingFailure

FAILURE = SettingFailure("OutOfMemory", "no room", 3)

OWN = '{"fingerprint": "f00d"}'


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def ledger(output: Path, fingerprint: str = "f00d") -> Ledger:
    return Ledger(output, fingerprint)


def test_a_new_ledger_owes_everything_and_writes_nothing(output: Path) -> None:
    assert ledger(output).result_path("a") is None
    assert list(output.iterdir()) == []


def test_a_setting_is_done_while_its_file_is_there(output: Path) -> None:
    (output / "a.json").write_text(OWN)
    ledger(output).mark_done("a", "a.json")
    assert ledger(output).result_path("a") == output / "a.json"
    assert ledger(output).result_path("b") is None
    (output / "a.json").unlink()
    assert ledger(output).result_path("a") is None


def test_a_failed_setting_is_due_again_and_keeps_its_reason(output: Path) -> None:
    (output / "a.json").write_text(OWN)
    first = ledger(output)
    first.mark_done("a", "a.json")
    first.mark_failed("b", FAILURE)
    again = ledger(output)
    assert (again.result_path("a"), again.result_path("b")) == (output / "a.json", None)
    stored = json.loads(again.path.read_text())
    assert stored["fingerprint"] == "f00d"
    assert stored["settings"]["b"] == {
        "result_file": None,
        "failure": {"error": "OutOfMemory", "reason": "no room", "attempts": 3},
    }
    again.mark_done("b", "a.json")
    assert ledger(output).result_path("b") == output / "a.json"
    assert ledger(output).result_path("a") == output / "a.json"


NAME = "task_imgsizeown_blocks2.json"
STOPPED = '{"fingerprint": "f00d", "precision": {"stopped_by": "stopped"}}'


def test_a_setting_of_a_run_that_was_stopped_is_due(output: Path) -> None:
    """Also where an earlier run had finished it, and its file was deleted to measure it again."""
    (output / NAME).write_text(OWN)
    assert ledger(output).has_result_file("own_blocks2")
    ledger(output).mark_done("own_blocks2", NAME)
    (output / NAME).write_text(STOPPED)
    ledger(output).mark_unfinished("own_blocks2")
    again = ledger(output)
    assert again.result_path("own_blocks2") is None and not again.has_result_file("own_blocks2")
    # Fails for good when it is resumed: nothing of it stays.
    again.mark_failed("own_blocks2", FAILURE)
    assert not (output / NAME).exists()


def test_a_setting_that_fails_keeps_its_whole_result(output: Path) -> None:
    (output / NAME).write_text(OWN)
    ledger(output).mark_failed("own_blocks2", FAILURE)
    assert (output / NAME).exists()


def test_another_fingerprint_or_folder_is_another_run(output: Path, tmp_path: Path) -> None:
    (output / "a.json").write_text(OWN)
    ledger(output).mark_done("a", "a.json")
    assert ledger(output, "beef").result_path("a") is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.json").write_text(OWN)
    assert ledger(elsewhere).result_path("a") is None


def test_a_folder_that_is_moved_takes_its_ledger_along(output: Path) -> None:
    (output / "a.json").write_text(OWN)
    ledger(output).mark_done("a", "a.json")
    moved = output.rename(output.with_name("moved"))
    assert Ledger(moved, "f00d").result_path("a") == moved / "a.json"


def test_result_files_of_this_run_count_without_a_ledger(output: Path) -> None:
    names = ["signs_imgsizetier-low_crops2_topk8_blocks16", "signs_imgsizetokens1008_blocks4"]
    for name in names:
        (output / f"{name}.json").write_text(OWN)
    (output / "signs_imgsizetier-high_crops11_topk8_blocks16.json").write_text('{"fingerprint": "beef"}')
    found = ledger(output)
    paths = [found.result_path(key) for key in ("tier-low_topk8_blocks16", "tokens1008_blocks4")]
    assert paths == [output / f"{name}.json" for name in names]
    assert found.result_path("tier-high_topk8_blocks16") is None
    assert not found.path.exists()
    found.list_found()
    assert sorted(json.loads(found.path.read_text())["settings"]) == [
        "tier-low_topk8_blocks16",
        "tokens1008_blocks4",
    ]


def test_a_setting_has_one_file_whatever_its_samples_are(output: Path) -> None:
    """Of one task and one setting, of which `crops` in the name says nothing."""
    names = ("a_imgsizetier-low_crops3_topk8_blocks16.json", "a_imgsizetier-low_crops2_topk8_blocks16.json")
    others = ("b_imgsizetier-low_crops3_topk8_blocks16.json", "a_imgsizetier-low_crops3_topk8_blocks4.json")
    for name in (*names, *others):
        (output / name).write_text(OWN)
    ledger(output).remove_others(names[1])
    assert sorted(path.name for path in output.iterdir()) == sorted((names[1], *others))


def test_the_same_folder_by_another_path_is_the_same_run(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output / "a.json").write_text(OWN)
    ledger(output).mark_done("a", "a.json")
    monkeypatch.chdir(tmp_path)
    assert Ledger(Path("./results"), "f00d").result_path("a") == output / "a.json"


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[]", "{}", '{"settings": []}', '{"settings": {"a": {}}}', '{"settings": {"a": []}}',
     '{"settings": {"a": {"result_file": null, "failure": {"why": "?"}}}}'],
)  # fmt: skip
def test_a_file_that_is_no_ledger_is_an_error_with_the_way_out(output: Path, content: str) -> None:
    path = ledger(output).path
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ResultsError, match="is not a ledger of this version .*; delete it"):
        ledger(output)


@pytest.mark.parametrize("content", ['{"fingerprint": "other"}', '{"fingerprint": "f00d"', "[]", ""])
def test_a_torn_file_or_one_of_another_run_is_due(output: Path, content: str) -> None:
    ledger(output).mark_done("a", "a.json")
    (output / "a.json").write_text(content)
    assert ledger(output).result_path("a") is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_result_that_the_disk_does_not_give_is_refused_and_not_measured_again(output: Path, is_listed: bool) -> None:
    """What is not mapped of a process's memory, a regular file, is an input/output error, like a bad block."""
    key, name = "tier-low_topk4_blocks2", "road-signs_imgsizetier-low_crops3_topk4_blocks2.json"
    if is_listed:
        ledger(output).mark_done(key, name)
    (output / name).symlink_to("/proc/self/mem")
    with pytest.raises(
        ResultsError, match=rf"{name} cannot be read \(Input/output error\); see that the disk is there"
    ):
        ledger(output).result(key)


def test_a_result_of_another_schema_is_refused_and_not_measured_over(output: Path) -> None:
    ledger(output).mark_done("a", "a.json")
    (output / "a.json").write_text('{"fingerprint": "f00d", "schema_version": 2, "per_sample_results": [1]}')
    with pytest.raises(ResultsError, match=r"a\.json is not a result of schema 1 \(its schema is 2\); resume with"):
        ledger(output).result("a")
    assert '"schema_version": 2' in (output / "a.json").read_text()


def test_results_of_others_are_those_of_the_same_task(output: Path) -> None:
    """Of five files one is this run's, one torn and one of another task."""
    low, high = "tier-low_topk4_blocks2", "tier-high_topk4_blocks2"
    for name, content in (
        (f"road-signs_imgsize{low}.json", '{"fingerprint": "beef", "accuracy": 1}'),
        ("road-signs_imgsizetier-low_crops3_topk8_blocks2.json", OWN),
        ("road-signs_imgsizetier-low_crops3_topk2_blocks2.json", '{"fingerprint": "be'),
        (f"words_imgsize{low}.json", '{"fingerprint": "beef"}'),
        (f"road-signs_imgsize{high}.json", '{"fingerprint": "beef"}'),
    ):
        (output / name).write_text(content)
    assert ledger(output).contents_of_others("road_signs") == [
        (high, {"fingerprint": "beef"}),
        (low, {"fingerprint": "beef", "accuracy": 1}),
    ]
    assert ledger(output, "beef").contents_of_others("road_signs") == [
        ("tier-low_topk8_blocks2", {"fingerprint": "f00d"})
    ]
