"""The page of a run at work: what its journals hold so far, and that it ends with the run."""

from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.planning.status import read_status
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER, RunPlan, write_plan
from experiment_core_utils.records.requests import MemoryReading
from experiment_core_utils.records.settings import FinishedSample, JournalHeader, MeasuredSample
from experiments.analyses.report import watch as watching
from experiments.analyses.report.watch import is_at_work, page_of_runs, partial_run, watch
from experiments.core_exp.report import main
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import failed_sample, measured_sample, staged_run

LOW, HIGH = setting("low"), setting("high")


def plan(folder: Path, task: str = "reference_vqa") -> None:
    keys = (LOW.key, HIGH.key)
    write_plan(RunPlan(1, "0001", "f00d", task, keys, keys, 4, 1, 0, 1_000_000.0), folder)


def journal(folder: Path, of: Setting, *samples: MeasuredSample, num_failed: int = 0) -> None:
    memory = MemoryReading(None, None, 1, "no GPU")
    with Journal(
        folder / PARTS_FOLDER, JournalHeader(JOURNAL_VERSION, of.key, "f00d", 0, 1, "0001", (0, 1, 2, 3))
    ) as own:
        for sample in samples:
            own.append(FinishedSample(sample, None, memory))
        for number in range(num_failed):
            own.append(FinishedSample(None, failed_sample(3 - number, "no picture"), memory))


def test_means_are_of_what_is_measured_so_far(tmp_path: Path) -> None:
    """A run of 1 s and one of 0.5 s + 0.25 s; the answers are "stop" and "go", the reference is "stop"."""
    plan(tmp_path)
    fast = staged_run(0.5, 0.25, ())
    journal(tmp_path, LOW, measured_sample(0, staged_run(), prediction="stop"),
            measured_sample(1, fast, prediction="go"), num_failed=1)  # fmt: skip
    found = partial_run(tmp_path, 1_000_100.0)
    low, high = found.settings
    assert (low.num_finished, low.num_failed, low.is_done) == (3, 1, False)
    assert low.mean_ms == pytest.approx(875.0) and low.accuracy == pytest.approx(0.5)
    assert (high.num_finished, high.accuracy, high.mean_ms) == (0, None, None)
    assert found.progress.startswith("3 of 8 samples, ")


def test_the_metric_of_own_data_is_not_known_before_the_end(tmp_path: Path) -> None:
    plan(tmp_path, "mine")
    journal(tmp_path, LOW, measured_sample(0))
    found = partial_run(tmp_path, 1_000_100.0)
    assert found.metric is None and found.settings[0].accuracy is None and found.settings[0].mean_ms == 1000.0


def test_once_a_setting_is_done_its_metric_is_that_of_the_page(tmp_path: Path) -> None:
    """`--metric` may have given another than the task's own."""
    plan(tmp_path)
    write(tmp_path, result(LOW) | {"metric": "acc"})
    found = partial_run(tmp_path, 1_000_100.0)
    page = page_of_runs("run", [found], is_at_work=True)
    assert found.metric == "acc" and "The score is by acc." in page and ">accuracy<" not in page


def test_the_page_loads_itself_again_while_the_run_is_at_work_alone(tmp_path: Path) -> None:
    plan(tmp_path)
    journal(tmp_path, LOW, measured_sample(0))
    runs = [partial_run(tmp_path, 1_000_100.0)]
    at_work, ended = (page_of_runs("<b>run", runs, is_at_work=each) for each in (True, False))
    assert 'http-equiv="refresh"' in at_work and 'http-equiv="refresh"' not in ended
    assert "&lt;b&gt;run" in at_work and "<b>run" not in at_work
    assert "unfinished" in at_work and "1 of 4" in at_work and "1000.0" in at_work


def test_before_a_run_the_page_says_that_it_may_be_loading() -> None:
    assert "No run has begun in this folder yet, or it is still loading." in page_of_runs("run", [], is_at_work=True)


def test_the_report_is_written_when_the_watched_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watching, "IDLE_S", 0.5)
    plan(tmp_path)
    write(tmp_path, result(LOW), result(HIGH))
    assert main([str(tmp_path), "--watch"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page and "What the knobs buy" in page


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watching, "IDLE_S", 0.5)
    page = tmp_path / "page.html"
    plan(tmp_path)
    with only_run_in(tmp_path / PARTS_FOLDER):
        journal(tmp_path, LOW, measured_sample(0))
        thread = Thread(target=watch, args=(tmp_path, page), daemon=True)
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join(30)
    assert not thread.is_alive() and 'http-equiv="refresh"' not in page.read_text()


def test_watching_goes_on_between_two_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of the first is free before the second has begun."""
    monkeypatch.setattr(watching, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watching, "IDLE_S", 5.0)
    first, second, page = tmp_path / "a", tmp_path / "b", tmp_path / "page.html"
    plan(first)
    thread = Thread(target=watch, args=(tmp_path, page), daemon=True)
    thread.start()
    thread.join(1)
    assert thread.is_alive() and 'http-equiv="refresh"' in page.read_text()
    plan(second, "ocr")
    thread.join(30)
    assert not thread.is_alive() and "ocr: " in page.read_text()


def test_a_run_whose_lock_is_unknown_is_at_work_until_nothing_is_left(tmp_path: Path) -> None:
    plan(tmp_path)
    (tmp_path / PARTS_FOLDER).mkdir(exist_ok=True)
    status = replace(read_status(tmp_path, 1_000_100.0), is_running=None)
    assert is_at_work(status)
    assert not is_at_work(replace(status, left=())) and not is_at_work(replace(status, conclusion="keep it"))
    assert not is_at_work(replace(status, is_running=False)) and is_at_work(replace(status, is_running=True, left=()))


def test_one_folder_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path), "--watch"]) == 2
    assert capsys.readouterr().err == "error: --watch is for one RESULTS_DIR; give one, or leave --watch\n"
