"""A front search: its rounds are measured one after the other into the ordinary journals.

Every process runs the same search on the same observations, which it reads from the journals of all: no process sends
another its next step. A search that was stopped is gone through again from its first round; what is in the journals
is not measured again.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from experiment_core_utils.config.parts import MachineConfig, MeasuringConfig
from experiment_core_utils.k_results_aggregation import collect_finished, merge_parts
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.contrasts import FEWEST_PICTURES
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsRefused
from experiment_core_utils.primitives.files import (
    read_regular_file,
    remove_file,
    write_json_atomically,
    write_text_atomically,
)
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.primitives.texts import all_of
from experiment_core_utils.records.journal import remove_journals
from experiment_core_utils.records.ledger import (
    BeatenSetting,
    Ledger,
    RemainingSetting,
    SearchRecord,
)
from experiment_core_utils.records.result_files import read_versioned_object
from experiment_core_utils.records.settings import MeasuredSetting, SettingFailure
from experiment_core_utils.sweep.batches import Bench
from experiment_core_utils.sweep.front_search import (
    LARGEST_SHARE,
    Observation,
    ParetoSearch,
    Removal,
    SearchResult,
    Survivor,
    run_search,
)
from experiment_core_utils.sweep.measurer import ShardMeasurer
from experiment_core_utils.sweep.sample_runs import RunContext
from experiment_core_utils.tasks.interface import Metric, answer_of, scores_of
from experiment_core_utils.tasks.sampling import shards_of
from experiment_core_utils.tasks.scoring.metrics import AnswerMetric

SEARCH_FILE = "pareto_search.json"
# Fewer are not enough for a verdict in the time there is.
LEAST_SAMPLES = math.ceil(FEWEST_PICTURES / LARGEST_SHARE)
_POLL_S = 0.1
SEARCH_SCHEMA_VERSION: Final = 2


def check_searchable(metric: Metric, num_samples: int) -> None:
    """Raises ConfigurationError for too few samples to search in a third of their time, and for a metric whose scores
    depend on which samples are scored together."""
    if num_samples < LEAST_SAMPLES:
        raise ConfigurationError(
            f"--pareto_search needs at least {LEAST_SAMPLES} samples, and there are {num_samples}; give more, or leave "
            "it out"
        )
    if not isinstance(metric, AnswerMetric):
        raise ConfigurationError(
            f"--pareto_search compares scores of single samples, and {metric.name} has no score of a single sample; "
            f"drop --pareto_search, or give a task with another metric"
        )


@dataclass
class FrontSearch:
    """One process's part of a search."""

    measuring: MeasuringConfig
    machine: MachineConfig
    context: RunContext
    bench: Bench
    measurer: ShardMeasurer
    settings: Sequence[Setting]
    sample_ids: Sequence[int]  #: all samples of the full run, in the random order in which the search uses them
    reference: str | None = None  #: key of the setting that is measured on all samples once the search is over
    #: what all processes have of each setting so far; settings that failed are not in it
    measured: dict[str, MeasuredSetting] = field(default_factory=dict, init=False)
    failures: dict[str, SettingFailure] = field(default_factory=dict, init=False)  #: why a setting failed
    #: why the reference setting failed on the samples that the search left; its result is of the others
    rest_failed: dict[str, SettingFailure] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._by_key = {setting.key: setting for setting in self.settings}
        self._search = ParetoSearch(list(self._by_key), self.sample_ids, self.bench.metric.best)
        self._requested: dict[str, set[int]] = {key: set() for key in self._by_key}

    def run(self) -> SearchResult:
        """Measure round after round, then what is left of the reference setting.

        Raises:
            Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
        """
        result = run_search(self._search, self._measure_round)
        if self.reference in self.measured and self._requested[self.reference] != set(self.sample_ids):
            self._measure_rest(self.reference)
        announce_end(self.context.journals, self.context.rank, self.context.experiment_id)
        return result

    def close(self, result: SearchResult, files: Mapping[str, str]) -> None:
        """Main process only: write what was found, and remove the journals once no process looks at them any more.

        Where a setting failed they stay: a stopped search resumes from them.

        Args:
            files: names of the settings' result files.
        """
        context, machine = self.context, self.machine
        write_json_atomically(self._record(result, files).content(), machine.output_dir / SEARCH_FILE)
        is_over = wait_until_all_are_over(
            context.journals, context.num_processes, context.experiment_id, machine.worker_timeout, context.stop
        )
        if is_over and not self.failures:
            for key in self._by_key:
                remove_journals(context.journals, key)

    def _record(self, result: SearchResult, files: Mapping[str, str]) -> SearchRecord:
        return SearchRecord(
            schema_version=SEARCH_SCHEMA_VERSION,
            fingerprint=self.context.fingerprint,
            stopped=result.stopped,
            share=result.share,
            T_model=1e3 * result.cost_s,
            T_model_full_grid=1e3 * result.full_cost_s,
            front=[_remaining(each, files) for each in result.front],
            undecided=[_remaining(each, files) for each in result.undecided],
            eliminated=[_beaten(each, files) for each in result.eliminated],
            failed={key: asdict(failure) for key, failure in self.failures.items()},
            rounds=[dict(each) for each in result.rounds],
        )

    def _measure_round(self, requested: Mapping[str, Sequence[int]]) -> dict[str, dict[int, Observation]]:
        context = self.context
        shards = {key: shards_of(sample_ids, context.num_processes) for key, sample_ids in requested.items()}
        own = {self._by_key[key]: of_key[context.rank] for key, of_key in shards.items()}
        is_blocked = self.measuring.order == "blocked"
        groups = [{setting: ids} for setting, ids in own.items()] if is_blocked else [own]
        with Progress(len(groups), sum(map(len, own.values())), shown=context.is_main) as progress:
            for group in groups:
                context.stop.raise_if_requested()
                self.measurer.measure(group, progress)
                if self.machine.enable_memory_optimization:
                    release_cached_memory(self.bench.model.device)
        return {key: self._collect(key, of_key) for key, of_key in shards.items()}

    def _measure_rest(self, key: str) -> None:
        """Measure a setting on all samples; nothing is decided by what is measured here."""
        found = self.measured[key]
        self._measure_round({key: self.sample_ids})
        if key in self.failures:
            self.rest_failed[key], self.measured[key] = self.failures.pop(key), found

    def _collect(self, key: str, shards: Mapping[int, Sequence[int]]) -> dict[int, Observation]:
        """What all processes measured of a setting in a round; nothing where it failed."""
        context = self.context
        shared = context.shared_setting(key, shards)
        parts = collect_finished(shared, self.machine.worker_timeout, context.stop)
        new = {sample_id for shard in shards.values() for sample_id in shard}
        # Journals may contain more already: of a search that was stopped later than here.
        self._requested[key] |= new
        merged = merge_parts([only(part, self._requested[key]) for part in parts], sorted(self._requested[key]))
        observed = observations(merged, self.bench.metric, new)
        if merged.failure is not None:
            self.failures[key] = merged.failure
        elif not observed:
            first = next(failure for failure in merged.failures if failure.sample_id in new)
            reason = f"{all_of(len(new), 'sample')} of a round failed, the first with: {first.reason}"
            self.failures[key] = SettingFailure(first.error, reason, self.measuring.max_config_retries + 1)
        else:
            self.measured[key] = merged
            return observed
        self.measured.pop(key, None)
        return {}


def announce_end(journals: Path, rank: int, experiment_id: str) -> None:
    """Say that this process's search is over and needs no journal any more."""
    write_text_atomically(experiment_id, _over_path(journals, rank))


def wait_until_all_are_over(
    journals: Path, num_processes: int, experiment_id: str, timeout_s: float, stop: StopRequest
) -> bool:
    """Wait for `announce_end` of every process; False where one has not said so within `timeout_s`.

    Raises:
        Stopped: a stop was requested while waiting.
        ResultsRefused: something else than a file lies where a process says so.
    """
    deadline = time.monotonic() + timeout_s
    waiting = set(range(num_processes))
    while waiting := {rank for rank in waiting if not _is_over(_over_path(journals, rank), experiment_id)}:
        if time.monotonic() > deadline:
            return False
        stop.raise_if_requested("while waiting for the other processes")
        time.sleep(_POLL_S)
    for rank in range(num_processes):
        remove_file(_over_path(journals, rank))
    return True


def _over_path(journals: Path, rank: int) -> Path:
    return journals / f"search_over.rank{rank}"


def _is_over(path: Path, experiment_id: str) -> bool:
    try:
        return read_regular_file(path) == experiment_id.encode()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ResultsRefused(f"{path} cannot be read ({error.strerror}); move it away") from error


def only(part: MeasuredSetting, sample_ids: set[int]) -> MeasuredSetting:
    """A part of these samples alone; of a batch of requests all are among them or none is."""
    return replace(
        part,
        requested_ids=None,
        samples=tuple(sample for sample in part.samples if sample.sample_id in sample_ids),
        failures=tuple(failure for failure in part.failures if failure.sample_id in sample_ids),
        arrivals=tuple(each for each in part.arrivals if sample_ids.issuperset(each.sample_ids)),
    )


def observations(merged: MeasuredSetting, metric: Metric, sample_ids: set[int]) -> dict[int, Observation]:
    """Observations of the samples that ran: their score, their runs' mean total, and all runs together as cost."""
    samples = [sample for sample in merged.samples if sample.sample_id in sample_ids]
    scores = scores_of([answer_of(sample) for sample in samples], metric) if samples else ()
    return {
        sample.sample_id: Observation(
            score=score.value,
            seconds=sample.mean_total_s,
            cost_s=sum(run.total_s for run in sample.runs),
            picture=sample.image_id,
        )
        for sample, score in zip(samples, scores, strict=True)
        if sample.mean_total_s is not None
    }


def finished_search(folder: Path, keys: Collection[str], ledger: Ledger) -> SearchRecord | None:
    """The run's own `pareto_search.json`, None where there is none of these settings with all their results.

    Raises:
        ResultsRefused: torn, of another schema, or a field of it is missing or cannot be.
    """
    path = folder / SEARCH_FILE
    if not path.exists():
        return None
    content = read_versioned_object(path, "the file of a search", SEARCH_SCHEMA_VERSION)
    if content.get("fingerprint") != ledger.fingerprint:
        return None
    found = SearchRecord.read(content, str(path), "remove it and run the same command again to resume")
    have = all(ledger.result(key) is not None for key in found.places)
    return found if have and {*found.places, *found.failed} == set(keys) else None


def _remaining(each: Survivor, files: Mapping[str, str]) -> RemainingSetting:
    return RemainingSetting(
        setting=each.key,
        result_file=files[each.key],
        num_samples=each.num_samples,
        accuracy=each.accuracy,
        T_total_mean=1e3 * each.seconds,
    )


def _beaten(each: Removal, files: Mapping[str, str]) -> BeatenSetting:
    return BeatenSetting(
        setting=each.key,
        result_file=files[each.key],
        by=each.by,
        round=each.round,
        num_samples=each.num_samples,
        accuracy_gain=each.gain,
        T_total_ratio=each.time_ratio,
    )
