"""Real runs of the driver, killed, starved and interrupted: the same command again, to the same results.

What is compared is everything but times, what is computed from them, resident memory, ids of runs and dates.
"""

import json
import random
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.records.journal import read_journal
from tests.conftest import save_tiny, tiny_config
from tests.processes.forked_runs import KILLED, TWO_PROCESSES, Ended, Run, RunServer
from tests.processes.sweep_contents import NOT_COMPARED, OF_THE_LAUNCH, Contents, contents, without

NUM_KILLS = 50
NUM_SETTINGS, NUM_SAMPLES = 4, 3
Kind = Mapping[str, Any]
# When a sample was measured says which measurement it was: no two last equally long to the nanosecond.
Seen = dict[tuple[str, int], tuple[float, ...]]


@dataclass(frozen=True)
class Sweep:
    """Runs of one command, one after the other, into one folder."""

    server: RunServer
    arguments: tuple[str, ...]
    output_dir: Path
    undisturbed: Contents
    seconds: float
    num_calls: int

    def run(self, **kind: Any) -> Ended:
        """This process alone."""
        return self.server.run(self._process({}, **kind))[0]

    def run_two(self, *more: str, first: Mapping[str, Any] | None = None, second: Mapping[str, Any] | None = None):  # type: ignore[no-untyped-def]
        """Two processes, each of which takes itself for the only one of its machine, on two addresses."""
        runs = [
            self._process({**TWO_PROCESSES, "RANK": str(rank)}, more, rank, **(kind or {}))
            for rank, kind in enumerate((first, second))
        ]
        return self.server.run(*runs)

    def _process(self, environment: Mapping[str, str], more: tuple[str, ...] = (), rank: int = 0, **kind: Any) -> Run:
        return Run([*self.arguments, *more], self.log_path(rank), environment, **kind)

    def log_path(self, rank: int = 0) -> str:
        return f"{self.output_dir}.{rank}.log"

    def log(self, rank: int = 0) -> str:
        """What the last process of that rank printed."""
        return Path(self.log_path(rank)).read_text()


@pytest.fixture(scope="module")
def first_sweep(run_server: RunServer, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """The command, and what it comes to when nothing disturbs it; its model is as small as two choices of blocks
    allow."""
    folder = tmp_path_factory.mktemp("sweep") / "results"
    model = save_tiny(tiny_config(num_hidden_layers=2, num_vision_layers=1), folder.parent / "model")
    arguments = (
        "--model_path", str(model), "--output_dir", str(folder), "--tier_list", "low", "--top_k_list", "2",
        "4", "--num_active_blocks_list", "1", "2", "--num_samples", str(NUM_SAMPLES), "--num_runs_per_sample", "1",
        "--num_warmup_runs", "0", "--max_warmup_runs", "1", "--max_repeats", "0", "--no_reference",
        "--max_new_tokens", "2",
        "--num_threads", "1", "--config_retry_delay", "0",
    )  # fmt: skip
    calls = folder.parent / "calls"
    (ended,) = run_server.run(Run(arguments, f"{folder}.0.log", calls_file=str(calls)))
    assert ended.code == 0, Path(f"{folder}.0.log").read_text()
    return Sweep(run_server, arguments, folder, contents(folder), ended.seconds, int(calls.read_text()))


@pytest.fixture
def sweep(first_sweep: Sweep) -> Sweep:
    """The same before its first run."""
    shutil.rmtree(first_sweep.output_dir, ignore_errors=True)
    return first_sweep


def remember(folder: Path, seen: Seen) -> None:
    """Whatever a journal or a result holds stays what it is: no sample is lost, none is measured again."""
    now: Seen = {}
    for path in (folder / ".parts").glob("*.jsonl"):
        journal = read_journal(path)
        for finished in journal.finished if journal is not None else ():
            assert finished.measured is not None
            key = (path.stem.rpartition(".rank")[0], finished.sample_id)
            assert key not in now
            now[key] = tuple(milliseconds(run.total_s) for run in finished.measured.runs)
    for path in folder.glob("*topk*.json"):
        result = json.loads(path.read_text())
        vision = "own" if result["tier"] is None else f"tier-{result['tier']}"
        setting = f"{vision}_topk{result['top_k']}_blocks{result['num_active_blocks']}"
        for sample in result["per_sample_results"]:
            times = tuple(run["T_total"] for run in sample["runs"])
            assert now.setdefault((setting, sample["sample_id"]), times) == times
    assert {key: now.get(key) for key in seen} == seen
    seen |= now


def test_killed_at_fifty_random_moments_it_comes_to_the_same_results(sweep: Sweep) -> None:
    """Half of the moments are drawn in time, half among the calls that change files (half a write included)."""
    draw = random.Random(20)
    seen: Seen = {}
    sweeps_ended, kills = 0, 0
    while kills < NUM_KILLS or seen:
        kind: dict[str, Any] = {}
        if kills < NUM_KILLS and kills % 2:
            kind["kill_after_s"] = draw.uniform(0, sweep.seconds)
        elif kills < NUM_KILLS:
            kind["kill_at_call"] = draw.randrange(sweep.num_calls)
        ended = sweep.run(**kind)
        if sweep.output_dir.exists():
            remember(sweep.output_dir, seen)
        if ended.code == KILLED:
            kills += 1
            continue
        assert ended.code == 0, sweep.log()
        assert contents(sweep.output_dir) == sweep.undisturbed
        assert len(seen) == NUM_SETTINGS * NUM_SAMPLES
        sweeps_ended += 1
        shutil.rmtree(sweep.output_dir)
        seen = {}
    assert sweeps_ended >= 3


def test_on_a_full_disk_it_stops_with_a_line_and_resumes_when_there_is_room(sweep: Sweep) -> None:
    seen: Seen = {}
    messages = []
    # Room for the header alone, for a sample or two, for the journal but not for the result, for all.
    for limit in (1_000, 3_000, 12_000, 1_000_000):
        ended = sweep.run(file_limit_bytes=limit)
        remember(sweep.output_dir, seen)
        messages.append(sweep.log().strip().splitlines()[-1])
        assert ended.code == (0 if limit == 1_000_000 else 1), sweep.log()
    for message in messages[:-1]:
        assert message.startswith("error: ") and "same command again" in message
        assert "Traceback" not in message
    assert any(".rank0.jsonl cannot be written (File too large)" in message for message in messages)
    assert any("_blocks2.json cannot be written (File too large)" in message for message in messages)
    assert contents(sweep.output_dir) == sweep.undisturbed
    # It is one run from its first sample on.
    results = [json.loads(path.read_text()) for path in sweep.output_dir.glob("*topk*.json")]
    (uids,) = {tuple(each["provenance"]["run_uids"]) for each in results}
    assert len(uids) == 1


def test_a_dead_process_does_not_hold_up_the_other_and_both_go_on(sweep: Sweep) -> None:
    """The second of two dies behind its first sample; then the first one. Two give what one gives."""
    seen: Seen = {}
    # Without the drift check's files the calls that follow are those of the journals.
    waits = ("--worker_timeout", "4")
    first, second = sweep.run_two(*waits, second={"kill_at_call": 7})
    assert (first.code, second.code) == (1, KILLED), sweep.log()
    assert first.seconds < 60
    assert re.search(r"no sample finished within 4 s by process 1 \(\d+ samples? missing: ", sweep.log())
    remember(sweep.output_dir, seen)
    first, second = sweep.run_two(first={"kill_at_call": 23})
    assert (first.code, second.code) == (KILLED, 1), sweep.log(1)
    line = sweep.log(1).strip().splitlines()[-1]
    assert line.startswith("error: ") and "lock is not locked any more: process 0 of the run has ended; " in line
    remember(sweep.output_dir, seen)
    for ended in sweep.run_two():
        assert ended.code == 0, sweep.log()
    remember(sweep.output_dir, seen)
    found = contents(sweep.output_dir, NOT_COMPARED | OF_THE_LAUNCH)
    assert found == without(sweep.undisturbed, OF_THE_LAUNCH)
    result = json.loads(next(sweep.output_dir.glob("*topk*.json")).read_text())
    assert result["provenance"]["num_processes"] == 2
    assert "2 processes share the CPU cores" in result["provenance"]["caveats"][0]


def test_a_main_process_that_is_stopped_is_missed_after_the_time_out(sweep: Sweep) -> None:
    """Neither process has an end then: the first one is killed later, for this test to end."""
    begun = f"{sweep.output_dir}/.parts/*rank0.jsonl"
    first, second = sweep.run_two(
        "--worker_timeout", "2", first={"signal_when": (begun, signal.SIGSTOP), "kill_after_s": 18.0}
    )
    assert (first.code, second.code) == (KILLED, 1), sweep.log(1)
    assert second.seconds < 18.0
    line = sweep.log(1).strip().splitlines()[-1]
    assert line.startswith("error: process 0 of the run has shown no sign of life for 2 s (")


@pytest.mark.parametrize(
    "command",
    [
        "rm -r {folder}",
        "mv {folder} {folder}.elsewhere",
        "rm -r {folder}/.parts",
        "rm {folder}/.parts/lock",
        "rm {folder}/.parts/*.jsonl",
    ],
)
def test_what_is_removed_under_a_run_ends_it_with_a_line(sweep: Sweep, command: str) -> None:
    shutil.rmtree(f"{sweep.output_dir}.elsewhere", ignore_errors=True)
    # With its first line in it: one that is removed before is made anew.
    ended = sweep.run(command_when=(f"{sweep.output_dir}/.parts/*.jsonl", command.format(folder=sweep.output_dir)))
    assert ended.code == 1, sweep.log()
    lines = [each for each in sweep.log().splitlines() if each.startswith("error: ")]
    assert len(lines) == 1 and " was removed or moved while this run writes it; " in lines[0], sweep.log()
    assert "Traceback" not in sweep.log()
    assert not list(sweep.output_dir.glob("*.json"))


def test_an_error_of_the_main_process_at_the_start_ends_all(sweep: Sweep) -> None:
    lock = sweep.output_dir / ".parts" / "lock"
    lock.mkdir(parents=True)
    first, second = sweep.run_two()
    assert (first.code, second.code) == (2, 2)
    for rank in (0, 1):
        assert sweep.log(rank).strip().splitlines()[-1].startswith(f"error: {lock} cannot be written (Is a directory)")


def test_a_process_that_does_not_come_is_an_error_after_the_time_out(sweep: Sweep) -> None:
    (ended,) = sweep.server.run(
        Run(
            [*sweep.arguments, "--worker_timeout", "2"],
            sweep.log_path(),
            {**TWO_PROCESSES, "RANK": "0"},
        )
    )
    assert ended.code == 1
    assert ended.seconds < 60
    assert sweep.log().strip().splitlines()[-1].startswith("error: the processes did not find each other (")


def test_machines_that_do_not_share_the_folder_are_refused(sweep: Sweep, tmp_path: Path) -> None:
    other = list(sweep.arguments)
    other[other.index("--output_dir") + 1] = str(tmp_path)
    ended = sweep.server.run(
        *(
            Run([*arguments, "--worker_timeout", "12"], sweep.log_path(rank), {**TWO_PROCESSES, "RANK": str(rank)})
            for rank, arguments in enumerate((sweep.arguments, other))
        )
    )
    assert [each.code for each in ended] == [2, 2], sweep.log()
    assert (
        f"error: processes 1 do not see what process 0 writes into {sweep.output_dir}/.parts; give all machines"
        in sweep.log()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_between_two_steps(sweep: Sweep, number: signal.Signals) -> None:
    ended = sweep.run(signal_when=(f"{sweep.output_dir}/.parts/*topk4_blocks1.rank0.jsonl", number))
    assert ended.code == 130, sweep.log()
    last = sweep.log().strip().splitlines()[-1]
    assert re.match(f"stopped by {number.name} between two (settings|samples|runs); ", last), last
    seen: Seen = {}
    remember(sweep.output_dir, seen)
    assert len(seen) < NUM_SETTINGS * NUM_SAMPLES
    assert sweep.run().code == 0
    remember(sweep.output_dir, seen)
    assert contents(sweep.output_dir) == sweep.undisturbed
