"""How far a run has come, from a plan, a ledger and journals made by hand."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.pipeline import run_profiling
from experiment_core_utils.planning.status import main, read_status, status_lines
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.records.conclusion import Conclusion, save_conclusion
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, journal_path, only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER, PLAN_VERSION, Ledger, RunPlan, write_plan
from experiment_core_utils.records.price_list import Price, PriceList, TypePrices
from experiment_core_utils.records.settings import (
    ArrivedGroup,
    FinishedSample,
    JournalHeader,
    SettingFailure,
    ShardDone,
)
from tests.hand_made_records import failed_sample, measured_sample, staged_run

STARTED = 1000.0
PLAN = RunPlan(PLAN_VERSION, "0002", "f00d", "signs", ("a", "b", "c"), ("a", "b", "c"), 4, 2, 1, STARTED)
MEMORY = MemoryReading(5, 6, 7, None)
BROKEN = FinishedSample(None, failed_sample(1, "truncated"), MEMORY)


def finished(sample_id: int) -> FinishedSample:
    return FinishedSample(measured_sample(sample_id, staged_run()), None, MEMORY)


def header(key: str, rank: int, experiment_id: str = "0002", fingerprint: str = "f00d") -> JournalHeader:
    return JournalHeader(JOURNAL_VERSION, key, fingerprint, rank, 2, experiment_id, (rank, rank + 2))


def journal(
    folder: Path,
    first: JournalHeader,
    *lines: JournalHeader | FinishedSample | ArrivedGroup | ShardDone,
    at: float = STARTED,
) -> None:
    with Journal(folder / PARTS_FOLDER, first) as opened:
        for line in lines:
            opened.append(line)
    os.utime(journal_path(folder / PARTS_FOLDER, first.key, first.rank), (at, at))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    write_plan(PLAN, tmp_path)
    return Ledger(tmp_path, "f00d")


def done(ledger: Ledger, folder: Path, key: str, at: float) -> None:
    (folder / f"{key}.json").write_text("{}")
    ledger.mark_done(key, f"{key}.json")
    os.utime(ledger.path, (at, at))


def lines_of(folder: Path, now: float) -> list[str]:
    """While a run has the lock of the folder."""
    with only_run_in(folder / PARTS_FOLDER):
        return status_lines(read_status(folder, now), Path("out"))


def test_a_run_in_the_middle_of_its_second_setting(ledger: Ledger, tmp_path: Path) -> None:
    done(ledger, tmp_path, "a", 1050.0)
    # Sample 0 was finished by run 0001, which the plan has counted as one before.
    journal(tmp_path, header("b", 0, "0001"), finished(0), header("b", 0), finished(2), at=1090.0)
    journal(tmp_path, header("b", 1), BROKEN, at=1100.0)
    status = read_status(tmp_path, 1130.0)
    assert (status.done, status.failed, status.left) == (("a",), {}, ("b", "c"))
    assert status.at_work is not None
    assert (status.at_work.key, status.at_work.finished) == ("b", {0, 1, 2})
    # 4 of a and 3 of b less the one before; 1 of b and 4 of c are missing: 100 s / 6 * 5 = 83.3 s.
    assert (status.paced[0], status.samples_missing) == (6, 5)
    assert status.left_s == pytest.approx(83.333, abs=1e-3)
    lines = lines_of(tmp_path, 1130.0)
    assert lines[0].startswith("out: run 0002 on signs, 4 samples a setting, 2 processes, started 1970-01-0")
    assert lines[1:] == [
        "settings: 1 done, 0 failed, 2 left of 3",
        "at work: b, 3 of 4 samples",
        "time left: about 1 min at this run's pace (6 samples in 2 min); last line written 30 s ago",
        "failed sample: b, 1: SampleError: truncated",
    ]
    # The system gives the lock back when a run ends in whatever way.
    assert status.is_running is False
    assert status_lines(status, Path("out"))[2:4] == [
        "stopped at b, 3 of 4 samples",
        f"stopped at {time.strftime('%H:%M:%S', time.localtime(1100.0))}; run the same command again to resume; "
        "time left: about 1 min at this run's pace (6 samples in 2 min)",
    ]


def test_loading_and_warm_up_are_no_pace(ledger: Ledger, tmp_path: Path) -> None:
    """After 500 s 2 processes finish a sample every 10 s each, which an earlier run's is not part of."""
    early = FinishedSample(measured_sample(0, staged_run()), None, MEMORY, 10.0)
    journal(tmp_path, header("a", 0, "0001"), early, header("a", 0), replace(finished(2), finished_unix_s=1500.0),
            at=1521.0)  # fmt: skip
    journal(tmp_path, header("a", 1), replace(BROKEN, finished_unix_s=1501.0), at=1501.0)
    status = read_status(tmp_path, 1530.0)
    assert status.left_s is None and lines_of(tmp_path, 1530.0)[3].startswith("time left: not known before the first")
    journal(tmp_path, header("b", 0), replace(finished(0), finished_unix_s=1510.0),
            replace(finished(2), finished_unix_s=1520.0), at=1521.0)  # fmt: skip
    # 4 by this run, 2 of them behind the first of each process, in 20 s; 12 - 5 are missing.
    status = read_status(tmp_path, 1530.0)
    assert (status.samples_missing, status.paced) == (7, (2, 20.0))
    assert status.left_s == pytest.approx(70.0)
    journal(tmp_path, header("b", 1), finished(1), at=1521.0)
    assert read_status(tmp_path, 1530.0).paced == (5, 521.0)


def test_what_is_finished_together_took_the_time_before_it_together(ledger: Ledger, tmp_path: Path) -> None:
    """Groups of two samples at two settings: the first ends at 1500 s, and of the second, at 1540 s, one is written."""
    write_plan(replace(PLAN, num_processes=1, num_samples_before=0), tmp_path)
    for key in ("a", "b"):
        journal(tmp_path, header(key, 0), *(replace(finished(each), finished_unix_s=1500.0) for each in (0, 1)))
    assert read_status(tmp_path, 1530.0).left_s is None
    with Journal(tmp_path / PARTS_FOLDER, header("a", 0)) as opened:
        done = tuple(replace(finished(each), finished_unix_s=1540.0) for each in (2, 3))
        opened.append(ArrivedGroup((), done))
    status = read_status(tmp_path, 1545.0)
    # 20 s a sample; two of b and four of c are missing.
    assert (status.paced, status.samples_missing, status.left_s) == ((2, 40.0), 6, pytest.approx(120.0))


def test_requests_that_arrive_at_a_rate_take_the_time_in_which_they_come(ledger: Ledger, tmp_path: Path) -> None:
    """Of 3 settings with 4 samples each, in 100 s; while no batch has ended nothing else is known."""
    write_plan(replace(PLAN, num_processes=1, num_samples_before=0, arrivals_s=100.0), tmp_path)
    assert lines_of(tmp_path, STARTED + 240)[2].startswith("time left: about 1 min at the rate of the requests; last ")
    assert not lines_of(tmp_path, STARTED + 219)[2].endswith("a long sample")
    assert lines_of(tmp_path, STARTED + 340)[2].startswith("time left: about 0 s at the rate of the requests; last ")
    # A run that was stopped has them before it.
    assert read_status(tmp_path, STARTED + 240).left_s == pytest.approx(300.0)
    for at_s, ids in ((1100.0, (0, 1)), (1160.0, (2, 3))):
        done = tuple(replace(finished(each), finished_unix_s=at_s) for each in ids)
        journal(tmp_path, header("a", 0), ArrivedGroup((), done), at=at_s)
    with only_run_in(tmp_path / PARTS_FOLDER):
        status = read_status(tmp_path, 1170.0)
    # Two samples in 60 s; the next two come since 10 s.
    assert (status.paced, status.left_s) == ((2, 60.0), pytest.approx(8 * 30 - 10))


def test_before_the_first_sample_the_time_is_not_known(ledger: Ledger, tmp_path: Path) -> None:
    write_plan(replace(PLAN, num_samples_before=0), tmp_path)
    assert lines_of(tmp_path, 1042.0)[1:] == [
        "settings: 0 done, 0 failed, 3 left of 3",
        "time left: not known before the first samples; started 42 s ago; last line written 42 s ago",
    ]


def test_a_run_that_is_silent_for_long_has_a_long_sample(ledger: Ledger, tmp_path: Path) -> None:
    journal(tmp_path, header("a", 0), finished(0), at=1010.0)
    assert lines_of(tmp_path, 1010.0 + 121)[-1].endswith("; last line written 2 min ago: a long sample")
    # Where the file system has no locks it may have stopped as well.
    unknown = replace(read_status(tmp_path, 1010.0 + 121), is_running=None)
    assert status_lines(unknown, Path("out"))[-1].endswith(" 2 min ago: stopped, or a long sample")
    assert lines_of(tmp_path, 1010.0 + 119)[-1].endswith("; last line written 2 min ago")


def test_at_the_end_failures_are_named_and_nothing_is_missing(ledger: Ledger, tmp_path: Path) -> None:
    for key in ("a", "c"):
        done(ledger, tmp_path, key, 1100.0)
    ledger.mark_failed("b", SettingFailure("OutOfMemory", "no room", 3))
    os.utime(ledger.path, (1200.0, 1200.0))
    # A setting that failed keeps its journals; both processes are at the end of their share.
    for rank in (0, 1):
        journal(tmp_path, header("b", rank), ShardDone("0002", None, None, None), at=1190.0)
    assert lines_of(tmp_path, 1500.0)[1:] == [
        "settings: 2 done, 1 failed, 0 left of 3",
        "finished 5 min ago",
        "failed: b: OutOfMemory after 3 attempts: no room",
    ]


def test_a_finished_run_shows_its_prices_and_proposes_the_next_question(ledger: Ledger, tmp_path: Path) -> None:
    """Half of 194 ms are 97."""
    for key in PLAN.keys:
        done(ledger, tmp_path, key, STARTED + 100)
    price = Price(0.05, "yes", "low", False, 0.39, (0.38, 0.41), None, None, 0.0, (-0.04, 0.04), None)
    prices = PriceList("signs", "own", None, (TypePrices("over all", 60, 194.0, 0.989, 0.045, (price,)),))
    save_conclusion(Conclusion("signs", "one setting", prices=prices), "0002", tmp_path)
    found = lines_of(tmp_path, STARTED + 160)
    assert found[3:] == [
        "conclusion: no setting is named: one setting",
        *prices.lines,
        "next: knobprof choose out --budget_ms 97",
    ]
    assert found[6] == (
        "    surely not worse by 5 points or more: low, 39 % [38, 41] of the time, accuracy +0.0 points [-4.0, +4.0]"
    )


def test_a_failure_of_an_earlier_run_is_missing_again(ledger: Ledger, tmp_path: Path) -> None:
    ledger.mark_failed("a", SettingFailure("OutOfMemory", "no room", 3))
    os.utime(ledger.path, (900.0, 900.0))
    status = read_status(tmp_path, 1001.0)
    assert (tuple(status.failed), status.samples_missing) == (("a",), 12)
    # While it is tried again it is neither.
    journal(tmp_path, header("a", 0), finished(0), at=1010.0)
    status = read_status(tmp_path, 1011.0)
    assert (status.failed, status.left, status.samples_missing) == ({}, ("a", "b", "c"), 11)


def test_a_result_that_was_deleted_is_left(ledger: Ledger, tmp_path: Path) -> None:
    done(ledger, tmp_path, "a", 1050.0)
    (tmp_path / "a.json").unlink()
    assert read_status(tmp_path, 1060.0).left == ("a", "b", "c")


def test_journals_of_another_run_say_nothing_about_this_one(ledger: Ledger, tmp_path: Path) -> None:
    journal(tmp_path, header("a", 0, fingerprint="beef"), finished(0))
    # Begun by an earlier run and not yet taken up by this one.
    journal(tmp_path, header("b", 0, "0001"), finished(0))
    status = read_status(tmp_path, 1001.0)
    assert status.at_work is None
    assert (status.paced[0], status.samples_missing) == (0, 11)


def test_a_real_run_leaves_a_plan_that_is_done(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = parse_config(
        ["--model_path", str(tiny_checkpoint), "--output_dir", str(tmp_path), "--num_samples", "2", "--tier_list",
         "low", "--top_k_list", "2", "4", "--num_active_blocks_list", "3", "--num_runs_per_sample", "1",
         "--num_warmup_runs", "0", "--max_repeats", "0", "--no_reference",
         "--max_new_tokens", "2",
         "--num_threads", "1", "--setting_order", "planned"]
    )  # fmt: skip
    report = run_profiling(config)
    status = read_status(tmp_path, time.time())
    assert status.plan.experiment_id == report.experiment_id
    assert status.done == status.plan.due == ("tier-low_topk2_blocks3", "tier-low_topk4_blocks3")
    assert (status.left, status.at_work, status.samples_missing) == ((), None, 0)
    copied = tmp_path.with_name(f"{tmp_path.name}_copied")
    shutil.copytree(tmp_path, copied)
    assert read_status(copied, time.time()).done == status.done
    elsewhere = shutil.copytree(tiny_checkpoint, tmp_path.with_name(f"{tmp_path.name}_model"))
    moved = config.replaced(output_dir=copied, model_path=str(elsewhere))
    assert run_profiling(moved).experiment_id is None
    run_profiling(config)
    assert "nothing was left to measure" in status_lines(read_status(tmp_path, time.time()), tmp_path)[0]
    first, second = sorted(tmp_path.glob("*_imgsize*.json"))
    first.write_text(first.read_text()[:2000])
    second.write_text(second.read_text().replace('"T_total_mean": ', '"T_total_mean": 1', 1))
    torn, edited = read_status(tmp_path, time.time()).broken
    assert torn == "the result of tier-low_topk2_blocks3 is torn; the same command measures it again"
    assert f"{second} was EDITED" in edited


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert "contains no plan of a run" in output and output.count("\n") == 1
    assert main([]) == 2


def test_what_an_edited_plan_says_moves_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(replace(PLAN, task="signs\x1b[2J\x1b]0;owned\x07\rx", keys=("a\x9b31m",), due=("a\x9b31m",)), tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "signs\\x1b[2J\\x1b]0;owned\\x07\\rx" in out and not set(out) & set("\x1b\x9b\x07\r")


def test_a_folder_of_several_datasets_answers_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("signs", "boards"):
        write_plan(replace(PLAN, task=task), tmp_path / task)
    (tmp_path / "nothing").mkdir()
    assert main([str(tmp_path)]) == 0
    output = [line for line in capsys.readouterr().out.splitlines() if "run 0002" in line]
    assert [line.split(",")[0] for line in output] == [
        f"{tmp_path}/boards: run 0002 on boards",
        f"{tmp_path}/signs: run 0002 on signs",
    ]


@pytest.mark.parametrize("python", ["without packages", "missing"])
def test_without_an_environment_the_script_says_in_one_line_what_to_run(tmp_path: Path, python: str) -> None:
    stub = tmp_path / "without packages"
    # Without its site-packages, whichever Python runs the tests.
    stub.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -I -S "$@"\n')
    stub.chmod(0o755)
    answer = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "check_status.sh"), str(tmp_path)],
        env=os.environ | {"PYTHON": str(tmp_path / python)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith(f"error: {tmp_path / python} is missing or lacks the packages of requirements.txt")
    assert "; run bash scripts/quickstart.sh once" in answer.stderr


def test_the_command_answers_without_torch(ledger: Ledger, tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "check_status.sh"
    answer = subprocess.run(
        ["bash", str(script), str(tmp_path)], env=os.environ | {"PYTHON": sys.executable}, cwd="/",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "settings: 0 done, 0 failed, 3 left of 3" in answer.stdout
    imported = (
        "import sys, experiment_core_utils.planning.status; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", imported], cwd=REPOSITORY).returncode == 0
