"""The driver where something goes wrong: settings that cannot run, pictures that cannot be read, retries."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.pipeline import measure_settings, run_profiling
from experiment_core_utils.planning.plan import RequestedRun, plan_for
from experiment_core_utils.primitives.errors import OutOfMemory, SampleError, SettingError, Stopped
from experiment_core_utils.records.journal import journal_path, read_journal
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.settings import SettingFailure
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import REFERENCE_TASKS, get_metric, get_metric_for_dataset, load_task
from experiments.core_exp.acc_lat_profiling import main
from experiments.core_exp.closing_lines import closing_lines
from tests.hand_made_records import drawn, failed_sample, measured_sample, part, result_of
from tests.processes.one_process import run_alone

KEY = "tier-low_topk4_blocks4"


@dataclass
class ScriptedTask:
    """The reference task, in which some samples raise the errors that are listed for them, one at each reading."""

    errors: dict[int, list[Exception]] = field(default_factory=dict)
    read: list[int] = field(default_factory=list)
    name: str = "scripted_vqa"
    split: str = "validation"
    metric: str = "vqa_score"
    max_new_tokens: int = 4
    source: dict[str, str] = field(default_factory=dict)
    is_generated: bool = True

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        if self.errors.get(index):
            error = self.errors[index].pop(0)
            if not isinstance(error, Acting):
                raise error
            error.act()
        return ReferenceVQA("validation")[index]

    def question_type(self, index: int) -> str:
        return "any"

    def prompt(self, sample: Sample) -> str:
        return f" {sample.question}"


@pytest.fixture
def config(tiny_checkpoint: Path, tmp_path: Path) -> ProfilingConfig:
    return parse_config(
        ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path / "results"), "--tier_list", "low",
         "--top_k_list", "4", "--num_active_blocks_list", "4", "--num_samples", "4", "--num_runs_per_sample", "1",
         "--num_warmup_runs", "0", "--max_new_tokens", "2", "--config_retry_delay", "0", "--max_config_retries", "2",
         "--max_repeats", "0", "--no_reference", "--num_threads", "1"]
    )  # fmt: skip


def profile(config: ProfilingConfig, task: ScriptedTask) -> tuple[dict[str, SettingFailure], Ledger]:
    """Measure the one setting of `config` on `task`, in this process alone."""
    source = find_model(config.model.model_path)
    requested = RequestedRun(config, source, plan_for(config, source), task, drawn(0, 1, 2, 3))
    ledger = Ledger(config.machine.output_dir, "f00d")
    run = run_alone(requested, ledger, "0001")
    return measure_settings(run, requested.settings), ledger


def saved(ledger: Ledger) -> dict:
    path = ledger.result_path(KEY)
    assert path is not None
    return json.loads(path.read_text())


def test_an_unreadable_picture_is_recorded_counted_and_excluded(config: ProfilingConfig) -> None:
    # Sample 0 is also the one that the warm-up would have used: the next one that can be read takes its place.
    unreadable: dict[int, list[Exception]] = {
        0: [SampleError("cannot identify image file")] * 3,
        2: [SampleError("truncated")] * 3,
    }
    failed, ledger = profile(config, ScriptedTask(unreadable))
    assert failed == {}
    result = saved(ledger)
    assert (result["num_samples"], result["num_failed_samples"], result["share_failed"]) == (2, 2, 0.5)
    assert [sample["sample_id"] for sample in result["per_sample_results"]] == [1, 3]
    assert result["failed_samples"] == [
        {"sample_id": 0, "error": "SampleError", "reason": "cannot identify image file"},
        {"sample_id": 2, "error": "SampleError", "reason": "truncated"},
    ]
    assert result["aggregate_stats"]["T_total_n"] == 2
    mean = sum(sample["accuracy"] for sample in result["per_sample_results"]) / 2
    assert result["accuracy"] == mean
    assert result["realised"]["blocks_run"] == [0, 1, 2, 3]


def test_a_setting_whose_every_picture_is_unreadable_failed(config: ProfilingConfig) -> None:
    failed, ledger = profile(config, ScriptedTask({index: [SampleError("no file")] * 3 for index in range(4)}))
    assert failed == {KEY: SettingFailure("SampleError", "all 4 samples failed, the first with: no file", 3)}
    assert ledger.result_path(KEY) is None
    assert not list(config.machine.output_dir.glob("*.json"))


@pytest.mark.parametrize("retries", [0, 2])
def test_a_setting_that_keeps_failing_is_tried_as_often_as_requested(config: ProfilingConfig, retries: int) -> None:
    task = ScriptedTask({1: [SettingError(f"no room {attempt}") for attempt in range(1, 10)]})
    failed, ledger = profile(config.replaced(max_config_retries=retries), task)
    attempts = retries + 1
    assert failed == {KEY: SettingFailure("SettingError", f"no room {attempts}", attempts)}
    # Sample 0, which every attempt warms up on, is kept prepared.
    assert task.read == [0] + [1] * attempts
    assert ledger.result_path(KEY) is None
    assert json.loads(ledger.path.read_text())["settings"][KEY]["failure"]["attempts"] == attempts
    assert not list(config.machine.output_dir.glob("*.json"))


def test_a_retry_that_succeeds_leaves_no_trace_of_the_failure(config: ProfilingConfig) -> None:
    task = ScriptedTask({1: [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]})
    failed, ledger = profile(config, task)
    assert failed == {}
    assert task.read == [0, 1, 1, 2, 3]
    result = saved(ledger)
    assert [sample["sample_id"] for sample in result["per_sample_results"]] == [0, 1, 2, 3]
    assert result["failed_samples"] == []


def test_the_vendors_lack_of_memory_is_recorded_by_its_name(config: ProfilingConfig) -> None:
    errors: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB") for _ in range(3)]
    failed, _ = profile(config, ScriptedTask({0: errors}))
    assert failed == {KEY: SettingFailure(OutOfMemory.__name__, "CUDA out of memory", 3)}


def test_a_program_error_of_one_sample_is_recorded_with_its_traceback(config: ProfilingConfig) -> None:
    failed, ledger = profile(config, ScriptedTask({1: [ZeroDivisionError("by zero") for _ in range(3)]}))
    assert failed == {}
    (sample,) = saved(ledger)["failed_samples"]
    assert (sample["sample_id"], sample["error"]) == (1, "ZeroDivisionError")
    reason, _, name = sample["reason"].rstrip(")").partition(" (traceback: ")
    assert reason == "sample 1: ZeroDivisionError: by zero"
    assert "in __getitem__" in (config.machine.output_dir / name).read_text()


def test_a_program_error_of_every_sample_fails_the_setting_and_comes_first(config: ProfilingConfig) -> None:
    config = config.replaced(max_config_retries=0)
    failed, _ = profile(config, ScriptedTask({each: [ZeroDivisionError("by zero")] for each in range(4)}))
    failure = failed[KEY]
    assert (failure.error, failure.attempts) == ("ZeroDivisionError", 1)
    assert failure.reason.startswith(
        "all 4 samples failed, the first with: sample 0: ZeroDivisionError: by zero (trace"
    )
    line = closing_lines(RunReport("0001", True, (), failed, (), config.machine.output_dir, None))[0]
    assert line == f"failed: {KEY}: ZeroDivisionError after 1 attempt: {failure.reason}"


# --- time limits, requests to stop, retries of samples -------------------------------------------------------------


@dataclass
class Acting(Exception):
    """No error: what a `ScriptedTask` does when the sample is read, before it is given."""

    act: Callable[[], None]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice() -> None:
    interrupt()
    time.sleep(1.1)  # nearer than a second they would be one press that a launcher passed on
    interrupt()


def journaled(config: ProfilingConfig) -> list[int]:
    content = read_journal(journal_path(config.machine.output_dir / PARTS_FOLDER, KEY, 0))
    return [] if content is None else [finished.sample_id for finished in content.finished]


@pytest.mark.parametrize(
    ("act", "error", "finished"), [(interrupt, Stopped, [0, 1]), (interrupt_twice, KeyboardInterrupt, [0])]
)
def test_ctrl_c_ends_the_sample_and_then_the_run_and_a_second_one_ends_it_at_once(
    config: ProfilingConfig, act: Callable[[], None], error: type[BaseException], finished: list[int]
) -> None:
    with pytest.raises(error):
        profile(config, ScriptedTask({1: [Acting(act)]}))
    assert journaled(config) == finished
    task = ScriptedTask()
    failed, ledger = profile(config, task)
    assert failed == {}
    # Sample 0 is read again for the warm-up; what is finished is not measured again.
    assert task.read == [0, *(number for number in range(1, 4) if number not in finished)]
    assert [sample["sample_id"] for sample in saved(ledger)["per_sample_results"]] == [0, 1, 2, 3]


def test_a_stopped_run_leaves_unfinished_results_of_the_same_samples_which_the_next_one_replaces(
    config: ProfilingConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config.replaced(top_k_list=(2, 4))
    with pytest.raises(Stopped):
        profile(config, ScriptedTask({2: [Acting(interrupt)]}))
    said = f"stopped: {config.machine.output_dir} has 2 samples of each of 2 settings, as results of an unfinished run"
    assert capsys.readouterr().err.splitlines()[-1] == said

    def results() -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(config.machine.output_dir.glob("*topk*.json"))]

    ids = [[sample["sample_id"] for sample in each["per_sample_results"]] for each in results()]
    assert ids == [[0, 1], [0, 1]]
    assert {each["precision"]["stopped_by"] for each in results()} == {"stopped"}
    failed, ledger = profile(config, ScriptedTask())
    assert failed == {} and ledger.result(KEY) is not None
    assert {(each["num_samples"], each["precision"]["stopped_by"]) for each in results()} == {(4, "num_samples")}


def test_a_sample_that_takes_too_long_is_tried_again_and_then_recorded(config: ProfilingConfig) -> None:
    def sleep() -> None:
        time.sleep(60)

    task = ScriptedTask({1: [Acting(sleep)], 2: [Acting(sleep), Acting(sleep)]})
    failed, ledger = profile(config.replaced(sample_timeout=2.0, max_config_retries=1), task)
    assert failed == {}
    result = saved(ledger)
    assert [sample["sample_id"] for sample in result["per_sample_results"]] == [0, 1, 3]
    assert result["failed_samples"] == [{"sample_id": 2, "error": "SampleTimedOut", "reason": "not done after 2 s"}]
    # The second attempt warms up on sample 0, which is kept, and takes up what the first one did not finish.
    assert task.read == [0, 1, 2, 3, 1, 2]


def test_a_sample_that_fails_is_tried_again_after_the_delay(config: ProfilingConfig) -> None:
    task = ScriptedTask({1: [SampleError("not yet")]})
    started = time.monotonic()
    failed, ledger = profile(config.replaced(config_retry_delay=1.5), task)
    assert time.monotonic() - started >= 1.5
    assert failed == {}
    assert saved(ledger)["failed_samples"] == []
    assert task.read == [0, 1, 2, 3, 1]


def test_what_ran_before_the_memory_ended_is_not_measured_again_by_the_next_run(config: ProfilingConfig) -> None:
    config = config.replaced(max_config_retries=0)
    failed, _ = profile(config, ScriptedTask({2: [torch.OutOfMemoryError("CUDA out of memory")]}))
    assert failed == {KEY: SettingFailure("OutOfMemory", "CUDA out of memory", 1)}
    assert journaled(config) == [0, 1]
    task = ScriptedTask()
    failed, ledger = profile(config, task)
    assert failed == {}
    assert task.read == [0, 2, 3]
    assert saved(ledger)["provenance"]["experiment_ids"] == ["0001"]
    assert journaled(config) == []


@pytest.mark.parametrize(
    ("is_main", "failed_settings", "failed_samples", "code"),
    [(True, 0, 0, 0), (True, 0, 1, 3), (True, 1, 0, 1), (True, 1, 1, 1), (False, 1, 0, 0)],
)
def test_the_exit_code_says_what_failed(is_main: bool, failed_settings: int, failed_samples: int, code: int) -> None:
    failures = tuple(failed_sample(number, "unreadable") for number in range(failed_samples))
    results = (result_of(part(measured_sample(7))), result_of(part(measured_sample(7), failures=failures)))
    failed = {KEY: SettingFailure("OutOfMemory", "no room", 3)} if failed_settings else {}
    assert RunReport("0001", is_main, results, failed, (), Path(), None).exit_code == code


# --- the program itself -------------------------------------------------------------------------------------------


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's SiLU as on a GPU with room for the features of four crops only (the low tier has at most four)."""
    silu = torch.nn.functional.silu

    def limited(states: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        if states.ndim == 3 and states.shape[0] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
        return silu(states, inplace)

    monkeypatch.setattr(torch.nn.functional, "silu", limited)


def arguments(checkpoint: Path, output_dir: Path, *tiers: str) -> list[str]:
    return [
        "acc_lat_profiling.py", "--model_path", str(checkpoint), "--output_dir", str(output_dir), "--tier_list", *tiers,
        "--top_k_list", "4", "--num_active_blocks_list", "4", "--num_samples", "2", "--num_runs_per_sample", "1",
        "--num_warmup_runs", "0", "--max_new_tokens", "2", "--max_config_retries", "1", "--config_retry_delay", "0",
        "--max_repeats", "0", "--no_reference", "--num_threads", "1",
    ]  # fmt: skip


@pytest.mark.usefixtures("small_device")
def test_a_setting_that_cannot_run_is_a_line_and_exit_code_1_and_the_others_are_saved(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", arguments(tiny_checkpoint, tmp_path, "low", "medium"))
    assert main() == 1
    printed = capsys.readouterr().out
    assert "failed: tier-medium_topk4_blocks4: OutOfMemory after 2 attempts: CUDA out of memory" in printed.splitlines()
    assert f"1 setting in {tmp_path}" in printed
    assert "warning:" not in printed  # one setting is not compared with anything
    assert len(list(tmp_path.glob("*_imgsizetier-low_*.json"))) == 1
    assert not list(tmp_path.glob("*_imgsizetier-medium_*.json"))
    monkeypatch.undo()  # the other device has room: only what failed is measured again
    low = next(tmp_path.glob("*_imgsizetier-low_*.json"))
    written = low.stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", arguments(tiny_checkpoint, tmp_path, "low", "medium"))
    assert main() == 0
    printed = capsys.readouterr().out
    assert "failed:" not in printed
    assert "\nwarning: only 2 samples per setting: " in printed
    assert len(list(tmp_path.glob("*_imgsizetier-medium_*.json"))) == 1
    assert low.stat().st_mtime_ns == written


@pytest.mark.usefixtures("small_device")
def test_a_run_in_which_every_setting_failed_prints_no_table(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", arguments(tiny_checkpoint, tmp_path, "high"))
    assert main() == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("failed: tier-high_topk4_blocks4: OutOfMemory after 2 attempts")
    assert lines[1].endswith(f": 0 settings in {tmp_path}")
    assert len(lines) == 2
    assert not list(tmp_path.glob("*.csv"))


@pytest.mark.parametrize("name", [task.name for task in REFERENCE_TASKS])
def test_the_shipped_model_on_every_family(name: str, tmp_path: Path) -> None:
    argv = ["--dataset_name", name, "--output_dir", str(tmp_path), "--num_samples", "4", "--tier_list", "low",
            "--top_k_list", "8", "--num_active_blocks_list", "16", "--num_runs_per_sample", "1",
            "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
            "--num_threads", "1"]  # fmt: skip
    assert not run_profiling(parse_config(argv)).failed
    (path,) = tmp_path.glob("*blocks16.json")
    result = json.loads(path.read_text())
    assert path.name.startswith(name.replace("_", "-"))
    task, metric = load_task(name, "validation"), get_metric(get_metric_for_dataset(name))
    assert (result["metric"], result["metric_best"]) == (metric.name, metric.best)
    assert result["provenance"]["experimental_variables"]["max_new_tokens"] == task.max_new_tokens
    assert result["provenance"]["task"]["source"]["read_from"] == "generated scenes"
    assert [result[key] for key in ("num_samples", "share_failed", "share_truncated", "share_unparsed")] == [4, 0, 0, 0]
    # It has learned each family: far from what an untrained model scores, which is 0.
    assert result["accuracy"] > metric.best / 5
    for sample in result["per_sample_results"]:
        again = task[sample["sample_id"]]
        assert tuple(sample["metadata"]["answers"]) == again.answers
        assert sample["metadata"]["image_id"] == again.image_id
