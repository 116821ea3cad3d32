"""The progress of the run in a results folder.

knobprof status RESULTS_DIR

Reads the run's plan, its ledger, the journals of settings that have no result yet and its conclusion with prices; no
result file and no torch, so that it answers at once. A run is at work while it has the lock of its folder.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.primitives.texts import counted, printable
from experiment_core_utils.primitives.units import span
from experiment_core_utils.records.conclusion import Conclusion, saved_conclusion
from experiment_core_utils.records.journal import LOCK_NAME, JournalContent, journals_in, read_journal
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, RunPlan, folders_with_plans, read_plan
from experiment_core_utils.records.locks import is_locked
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.settings import FinishedSample, JournalHeader, SettingFailure

FAILURES_SHOWN = 5
# Longer than most samples take.
SILENT_AFTER_S = 120.0


@dataclass(frozen=True)
class SettingJournals:
    """What the processes have written of one setting that has no result yet."""

    key: str
    finished: frozenset[int]  #: samples that are done with, over all processes and runs
    failed: tuple[FailedSample, ...]  #: those of them that failed
    is_at_work: bool  #: the plan's run has started it, and not every process is at the end of its shard
    written_unix_s: float  #: when the last line was written
    #: by process when the plan's run finished samples, of those of which it was noted
    finished_unix_s: Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Status:
    """How far a run has come."""

    plan: RunPlan
    is_running: bool | None  #: a run has the lock of the folder; None where that cannot be known
    done: tuple[str, ...]  #: settings of the plan that have a result
    failed: dict[str, SettingFailure]  #: settings whose last attempt failed, with why
    left: tuple[str, ...]  #: settings with neither
    broken: tuple[str, ...]  #: why results cannot be read, where no run is at work
    #: the setting that is being measured, or was when the run stopped; None before the first, between two, and at the
    #: end
    at_work: SettingJournals | None
    failed_samples: tuple[tuple[str, FailedSample], ...]
    samples_missing: int  #: samples that it has still to run
    elapsed_s: float  #: from its begin to the last line that it wrote
    #: samples that it has finished behind the first of each process, or those that were finished together with that,
    #: and how long they took: its pace. Where settings have results already, all of its samples in the time from its
    #: begin
    paced: tuple[int, float]
    finishing_s: float  #: since it finished the last of these, or began
    written_unix_s: float  #: when it wrote that line
    silent_s: float  #: since then
    #: what the run ended with, or why that is not shown; None before its end
    conclusion: Conclusion | str | None

    @property
    def left_s(self) -> float | None:
        """Time left at the pace so far, else at the rate of its requests; None where there is neither."""
        number, seconds = self.paced
        arriving_s = self.plan.arrivals_s
        if number <= 0 and arriving_s is None:
            return None
        each_s = seconds / number if number > 0 else (arriving_s or 0.0) / self.plan.num_samples
        # Of requests that arrive together nothing is seen before all are finished.
        spent_s = 0.0 if arriving_s is None or self.is_running is False else self.finishing_s
        return max(each_s * self.samples_missing - spent_s, 0.0)


def read_status(output_dir: Path, now_unix_s: float) -> Status:
    """The state of the last run in a results folder.

    Raises:
        ResultsError: no run was started there, or its files are of another version.
    """
    plan = read_plan(output_dir)
    ledger = Ledger(output_dir, plan.fingerprint)
    journals = read_journals(output_dir / PARTS_FOLDER, plan)
    done = tuple(key for key in plan.keys if ledger.has_result_file(key))
    at_work = max(
        (each for each in journals if each.is_at_work and each.key not in done),
        key=lambda each: each.written_unix_s,
        default=None,
    )
    failures = {key: failure for key in plan.keys if (failure := ledger.failure(key)) is not None}
    failed = {key: failure for key, failure in failures.items() if at_work is None or key != at_work.key}
    written = ledger.path.stat().st_mtime if ledger.path.exists() else 0.0
    # Failures of an earlier run are tried again: they count once this run has written about any.
    settled = set(done) | (set(failed) if written >= plan.started_unix_s else set())
    finished = {each.key: len(each.finished) for each in journals}
    # A setting that failed may have left samples out; none of them is run any more.
    missing = sum(plan.num_samples - finished.get(key, 0) for key in plan.due if key not in settled)
    by_run = (
        sum(plan.num_samples if key in done else finished.get(key, 0) for key in plan.due) - plan.num_samples_before
    )
    last_s = max([plan.started_unix_s, *(each.written_unix_s for each in journals), written])
    by_rank: dict[int, list[float]] = {}
    for rank, moments in (item for each in journals if each.key in plan.due for item in each.finished_unix_s.items()):
        by_rank.setdefault(rank, []).extend(moments)
    ended = [moment for moments in by_rank.values() for moment in moments]
    paced = by_run, last_s - plan.started_unix_s
    if len(ended) == by_run > 0:
        # Loading and warm-up come before.
        later = sum(moment > min(moments) for moments in by_rank.values() for moment in moments)
        paced = later, max(ended) - min(ended)
    is_running = is_locked(output_dir / PARTS_FOLDER / LOCK_NAME)
    return Status(
        plan=plan,
        is_running=is_running,
        done=done,
        broken=() if is_running else tuple(_broken(ledger, done)),
        failed=failed,
        left=tuple(key for key in plan.keys if key not in done and key not in failed),
        at_work=at_work,
        failed_samples=tuple((each.key, sample) for each in journals for sample in each.failed),
        samples_missing=missing,
        elapsed_s=last_s - plan.started_unix_s,
        paced=paced,
        finishing_s=max(now_unix_s - max([plan.started_unix_s, *ended]), 0.0),
        written_unix_s=last_s,
        silent_s=max(now_unix_s - last_s, 0.0),
        conclusion=saved_conclusion(output_dir, plan.experiment_id),
    )


def _broken(ledger: Ledger, done: Sequence[str]) -> Iterator[str]:
    for key in done:
        try:
            if ledger.result(key) is None:
                yield f"the result of {key} is torn; the same command measures it again"
        except ResultsRefused as error:
            yield str(error)


def read_journals(folder: Path, plan: RunPlan) -> list[SettingJournals]:
    """The journals of the plan's run, setting by setting in the order of the names; others are left out."""
    found: dict[str, list[tuple[JournalContent, float]]] = {}
    for path in journals_in(folder):
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            # A setting's journals are removed as soon as it is saved: one that was just listed may be gone.
            continue
        content = read_journal(path)
        if content is not None and content.header.fingerprint == plan.fingerprint:
            found.setdefault(content.header.key, []).append((content, written))
    return [of_setting(key, journals, plan) for key, journals in found.items()]


def of_setting(key: str, journals: Sequence[tuple[JournalContent, float]], plan: RunPlan) -> SettingJournals:
    """What the journals of all processes come to."""
    finished = [sample for content, _ in journals for sample in content.finished]
    started = [content for content, _ in journals if content.last_header.experiment_id == plan.experiment_id]
    at_end = [content for content in started if content.end is not None]
    return SettingJournals(
        key=key,
        finished=frozenset(sample.sample_id for sample in finished),
        failed=tuple(sample.failed for sample in finished if sample.failed is not None),
        is_at_work=bool(started) and len(at_end) < plan.num_processes,
        written_unix_s=max(written for _, written in journals),
        finished_unix_s={content.header.rank: _moments_of(content, plan.experiment_id) for content, _ in journals},
    )


def _moments_of(content: JournalContent, experiment_id: str | None) -> list[float]:
    """When a run finished the samples that it noted in a journal."""
    found, current = [], None
    for line in content.lines:
        if isinstance(line, JournalHeader):
            current = line.experiment_id
        elif isinstance(line, FinishedSample) and current == experiment_id and line.finished_unix_s is not None:
            found.append(line.finished_unix_s)
    return found


def status_lines(status: Status, output_dir: Path) -> list[str]:
    """The answer for a terminal."""
    plan = status.plan
    run = f"run {plan.experiment_id}" if plan.experiment_id is not None else "nothing was left to measure"
    processes = counted(plan.num_processes, "process")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(plan.started_unix_s))
    each = f"{counted(plan.num_samples, 'sample')} a setting"
    lines = [
        f"{output_dir}: {run} on {plan.task}, {each}, {processes}, started {began}",
        f"settings: {len(status.done)} done, {len(status.failed)} failed, {len(status.left)} left of {len(plan.keys)}",
    ]
    if status.at_work is not None:
        finished = len(status.at_work.finished)
        state = "stopped at" if status.is_running is False else "at work:"
        lines.append(f"{state} {status.at_work.key}, {finished} of {counted(plan.num_samples, 'sample')}")
    lines += [time_line(status), *(f"broken: {each}" for each in status.broken), *failure_lines(status)]
    found = status.conclusion
    if found is None or isinstance(found, str):
        return lines if found is None else [*lines, f"conclusion: {found}"]
    question = None if found.prices is None else found.prices.next_question
    following = [] if question is None else [f"next: knobprof choose {shlex.quote(str(output_dir))} {question}"]
    return [*lines, *found.lines, *following]


def time_line(status: Status) -> str:
    """How long it will take, and whether anything moves."""
    if status.samples_missing == 0:
        return f"finished {span(status.silent_s)} ago"
    number, seconds = status.paced
    if status.left_s is None:
        pace = f"time left: not known before the first samples; started {span(status.elapsed_s + status.silent_s)} ago"
    else:
        paced = f"at this run's pace ({counted(number, 'sample')} in {span(seconds)})"
        pace = f"time left: about {span(status.left_s)} {paced if number > 0 else 'at the rate of the requests'}"
    if status.is_running is False:
        day = "%Y-%m-%d " if status.silent_s > 12 * 3600 else ""
        stopped_at = time.strftime(f"{day}%H:%M:%S", time.localtime(status.written_unix_s))
        return f"stopped at {stopped_at}; run the same command again to resume; {pace}"
    silent = f"; last line written {span(status.silent_s)} ago"
    stopped = ": a long sample" if status.is_running else ": stopped, or a long sample"
    is_long = status.silent_s > SILENT_AFTER_S + (status.plan.arrivals_s or 0.0)
    return pace + silent + (stopped if is_long else "")


def failure_lines(status: Status) -> list[str]:
    """The last few settings that failed, and the last few samples of settings that have no result yet."""
    settings = [
        f"failed: {key}: {failure.error} after {counted(failure.attempts, 'attempt')}: {failure.reason}"
        for key, failure in list(status.failed.items())[-FAILURES_SHOWN:]
    ]
    samples = [
        f"failed sample: {key}, {sample.sample_id}: {sample.error}: {sample.reason}"
        for key, sample in status.failed_samples[-FAILURES_SHOWN:]
    ]
    return settings + samples


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Exit code: 0 answered, 1 no run was begun there, 2 the request cannot be met."""
    parser: argparse.ArgumentParser = OneLineParser(
        prog="python -m experiment_core_utils.planning.status",
        description="Show how far a run has come.",
        examples=("knobprof status results/core_exp", "knobprof status results/several"),
    )
    parser.add_argument(
        "results_dir", type=Path, metavar="RESULTS_DIR", help="the --output_dir of a run, or of several datasets"
    )
    results_dir = parser.parse_args(argv).results_dir
    for output_dir in folders_with_plans(results_dir) or [results_dir]:
        print("\n".join(map(printable, status_lines(read_status(output_dir, time.time()), output_dir))))


if __name__ == "__main__":
    sys.exit(run_command(main))
