"""The page of a run that is at work: what each setting has so far, without verdicts, written anew after each change.

Results of settings that are measured in rounds are saved at the end; until then their samples are in journals.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.planning.status import Status, read_status, time_line
from experiment_core_utils.primitives.errors import ProfilerError
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.journal import own_journals
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, folders_with_plans
from experiment_core_utils.records.result_files import RESULT_FILES
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.interface import Metric, answer_of, scores_of
from experiment_core_utils.tasks.registry import get_metric, get_metric_for_dataset
from experiments.analyses.report.page import HERE, pages, write_page

# Between two looks at the folder, and of the page's own reload.
INTERVAL_S, RELOAD_S = 2.0, 5
# Between two datasets no folder has a run at work; watching ends after so long without one.
IDLE_S = 60.0
# Reading journals takes at most this fraction of the time.
_BUSY = 0.2


@dataclass(frozen=True)
class PartialSetting:
    """What a setting has so far."""

    key: str
    num_finished: int  #: samples that are done with
    num_failed: int  #: those of them that failed
    accuracy: float | None  #: mean score of its samples; None without one, or where the metric is not known
    mean_ms: float | None  #: mean total time of its runs; None without one
    is_done: bool  #: whether its result is saved


@dataclass(frozen=True)
class PartialRun:
    """What a run's folder has so far."""

    status: Status
    metric: str | None  #: that answers are scored by, until a setting is done the task's own; None where not known
    settings: Sequence[PartialSetting]  #: in the order of the plan

    @property
    def has_failed(self) -> bool:
        """Whether any sample has failed."""
        return any(setting.num_failed for setting in self.settings)

    @property
    def progress(self) -> str:
        """Such as `12 of 216 samples, time left: about 5 min`."""
        number = self.status.plan.num_samples * len(self.settings)
        finished = sum(setting.num_finished for setting in self.settings)
        return f"{finished} of {counted(number, 'sample')}, {time_line(self.status)}"


def watch(folder: Path, output: Path) -> None:
    """Write the page after each change until no run was at work in the folder for IDLE_S; waits for the first one.

    Raises:
        ResultsError: a file of the run is broken.
    """
    before, worked = None, time.monotonic()
    while True:
        began = time.monotonic()
        runs = [partial_run(each, time.time()) for each in folders_with_plans(folder)]
        if not runs or any(is_at_work(run.status) for run in runs):
            worked = began
        is_over = began - worked > IDLE_S
        now = (is_over, _changes(folder))
        if now != before:
            write_page(page_of_runs(folder.name, runs, not is_over), output)
            before = now
        if is_over:
            return
        time.sleep(max(INTERVAL_S, (time.monotonic() - began) / _BUSY))


def is_at_work(status: Status) -> bool:
    """Whether a run has the lock; where that cannot be known, whether settings are left and there is no conclusion."""
    return status.is_running if status.is_running is not None else bool(status.left) and status.conclusion is None


def _changes(folder: Path) -> list[tuple[str, int, int]]:
    """What changes when a run writes: names, times and sizes of its journals, ledgers and results."""
    found = []
    for each in folders_with_plans(folder):
        parts = each / PARTS_FOLDER
        for path in sorted((*parts.glob("*.json"), *parts.glob("*.jsonl"), *each.glob(RESULT_FILES))):
            try:
                state = path.stat()
            except FileNotFoundError:  # a setting that was just saved has no journal any more
                continue
            found.append((str(path), state.st_mtime_ns, state.st_size))
    return found


def partial_run(folder: Path, now_unix_s: float) -> PartialRun:
    """What the run in a folder has so far; raises ResultsError for a broken file."""
    status = read_status(folder, now_unix_s)
    ledger = Ledger(folder, status.plan.fingerprint)
    done = next((result for key in status.done if (result := ledger.result(key)) is not None), None)
    metric = _metric_of(status.plan.task) if done is None else _metric_named(done.metric)
    settings = [
        _of_result(ledger, key) if key in status.done else _of_journals(folder, key, status, metric)
        for key in status.plan.keys
    ]
    return PartialRun(status, None if metric is None else metric.name, settings)


def _metric_of(task: str) -> Metric | None:
    try:
        return _metric_named(get_metric_for_dataset(task))
    except ProfilerError:
        # Own data, of which the plan does not name the metric.
        return None


def _metric_named(name: str) -> Metric | None:
    try:
        return get_metric(name)
    except ProfilerError:
        # Of a module of the user's, which a page does not run.
        return None


def _of_result(ledger: Ledger, key: str) -> PartialSetting:
    result = ledger.result(key)
    if result is None:
        return PartialSetting(key, 0, 0, None, None, False)
    failed, ran = result.num_failed_samples, result.per_sample_results
    mean_ms = mean_of([each.mean_total for each in ran])
    return PartialSetting(key, len(ran) + failed, failed, result.accuracy, mean_ms, True)


def _of_journals(folder: Path, key: str, status: Status, metric: Metric | None) -> PartialSetting:
    journals = own_journals(folder / PARTS_FOLDER, key, status.plan.fingerprint).values()
    finished = {each.sample_id: each for content in journals for each in content.finished}
    measured = [each.measured for each in finished.values() if each.measured is not None]
    seconds = mean_of([each.mean_total_s for each in measured])
    return PartialSetting(
        key,
        len(finished),
        len(finished) - len(measured),
        _accuracy(measured, metric),
        None if seconds is None else 1e3 * seconds,
        False,
    )


def _accuracy(measured: Sequence[MeasuredSample], metric: Metric | None) -> float | None:
    if metric is None or not measured:
        return None
    try:
        return mean_of([score.value for score in scores_of([answer_of(each) for each in measured], metric)])
    except ProfilerError:
        # Some metrics score a whole run, and not so few answers.
        return None


def page_of_runs(name: str, runs: Sequence[PartialRun], is_at_work: bool) -> str:
    """The text of the page, which loads itself again while a run is at work.

    Args:
        name: of the folder.
    """
    return (
        pages()
        .get_template("watch.html")
        .render(
            name=name,
            runs=runs,
            reload_s=RELOAD_S if is_at_work else None,
            style=(HERE / "page.css").read_text(encoding="utf-8"),
        )
    )
