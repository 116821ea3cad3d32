"""A sweep as a function call: records, frames, the front and the page of one folder, which may be moved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import knob_profiler as kp
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.settings import SettingFailure


@pytest.fixture(scope="module")
def results(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> kp.Results:
    return kp.profile(
        tiny_checkpoint, "reference_vqa", tiers=["low"], top_k=[2, 4], active_blocks=[3], samples=2,
        output_dir=tmp_path_factory.mktemp("api") / "results", num_runs_per_sample=1, num_warmup_runs=0,
        max_repeats=0, max_new_tokens=2, num_threads=1, no_reference=True,
    )  # fmt: skip


def test_a_call_measures_what_it_names(results: kp.Results) -> None:
    assert [(each.tier, each.top_k, each.num_active_blocks) for each in results.settings] == [
        ("low", 2, 3),
        ("low", 4, 3),
    ]
    assert results.failed == {}
    frame = results.frame()
    assert list(frame["setting"]) == ["tier-low_topk2_blocks3", "tier-low_topk4_blocks3"]
    assert set(frame["task"]) == {"reference_vqa"} and (frame["T_total_mean_ms"] > 0).all()
    assert len(results.samples()) == 4


def test_it_shows_itself_in_one_line(results: kp.Results) -> None:
    shown = repr(results)
    assert shown == f"Results({str(results.folder)!r}: 2 settings of reference_vqa)"
    assert repr(kp.load(results.folder)) == shown
    failed = kp.Results(results.folder, (), {"tier-low_topk2_blocks3": SettingFailure("OutOfMemory", "no memory", 3)})
    assert repr(failed) == f"Results({str(results.folder)!r}: 0 settings of no task, 1 failed)"


def test_the_module_lists_its_published_names_alone() -> None:
    assert [name for name in dir(kp) if not name.startswith("__")] == ["Results", "load", "profile"]
    assert {"__doc__", "__file__", "__name__"} <= set(dir(kp))


def test_the_front_names_cost_and_unit(results: kp.Results) -> None:
    front = results.front(num_draws=50)
    assert list(front.columns) == ["task", "setting", "accuracy", "latency_mean_ms", "probability", "status"]
    assert set(front["setting"]) <= set(results.frame()["setting"]) and len(front) >= 1
    assert front["latency_mean_ms"].is_monotonic_increasing
    with pytest.raises(ResultsError, match="no cost 'watts'; give one of latency_mean, .*flops"):
        results.front("watts")
    with pytest.raises(ResultsError, match="reference_vqa has no front of accuracy and mean energy of a request: "):
        results.front("energy")


def test_the_conclusion_is_a_record_and_in_the_folder(results: kp.Results) -> None:
    found = results.conclusion
    assert found.task == "reference_vqa" and results.conclusions() == [found]
    assert json.loads((results.folder / "conclusion.json").read_text())["sentence"] == found.sentence
    assert str(found).startswith(f"conclusion: {found.sentence}")


def test_other_settings_of_the_folder_are_left_out(results: kp.Results) -> None:
    first = kp.Results(results.folder, results.settings[:1], {})
    assert list(first.frame()["setting"]) == ["tier-low_topk2_blocks3"]


def test_a_folder_is_loaded_wherever_it_lies(results: kp.Results, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in results.folder.glob("*.json"):
        (moved / path.name).write_bytes(path.read_bytes())
    loaded = kp.load(str(moved))
    assert loaded.settings == results.settings
    assert loaded.frame().equals(results.frame())


def test_the_page_is_written_where_it_is_wanted(results: kp.Results, tmp_path: Path) -> None:
    assert results.report(tmp_path / "page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_wrong_value_or_name_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^unknown tier 'lwo' \(did you mean low"):
        kp.profile(tiers=["lwo"])
    with pytest.raises(ConfigurationError, match=r"^num_sample: there is no such key \(did you mean num_samples"):
        kp.profile(num_sample=3)
    with pytest.raises(ConfigurationError, match=r"^unknown tier 'lwo' \(did you mean low"):
        kp.profile(tier_list=["lwo"])
    with pytest.raises(ConfigurationError, match=r"^tier_list: given twice, also by its short name; give one"):
        kp.profile(tiers=["low"], tier_list=["low"])
    with pytest.raises(ConfigurationError, match=r"^dry_run: this call measures; for a plan run the command"):
        kp.profile(dry_run=True)
    with pytest.raises(ConfigurationError, match=r"^--output_dir: a path is missing; write \. for the current folder"):
        kp.profile(output_dir="")


def test_the_import_alone_takes_no_torch() -> None:
    code = "import sys, knob_profiler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'profil'"):
        kp.profil  # noqa: B018
