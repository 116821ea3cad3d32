"""Drift: a control setting that is measured again along a run shows how the machine's speed changed.

The control setting is measured on a few fixed samples when the run begins, after every few settings and at the end. Its
times enter no latency statistic. Each process checks its own device and has a file of its own; only the main one waits,
at the end, for the others' last readings.
A result is saved before the readings after it are known: the main process fills them in when the run closes, or the
next run does.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from experiment_core_utils.config.parts import MeasuringConfig
from experiment_core_utils.e_inference import run_staged
from experiment_core_utils.j_results_saving import save_setting_result
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.meters.stability import DRIFT_LIMIT, drift_ratio, needs_another_run
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import ResultsRefused, SampleError, SettingError, library_faults_named
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.interruption import StopRequest, time_limit
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.result_files import field_fault, read_versioned_object
from experiment_core_utils.records.setting_result import Drift
from experiment_core_utils.records.settings import DriftReading
from experiment_core_utils.sweep.batches import Bench
from experiment_core_utils.sweep.measurer import RunContext

DRIFT_VERSION = 1
CONTROL_SAMPLES = 5
# Where samples cannot be read, so many are tried before the check is given up.
_MOST_CANDIDATES = 12
_POLL_S = 0.1
# Why the result of a run that was killed, or that still runs, has no readings.
NOT_CLOSED = "run not closed: the next run of the same command fills this in"
Totals = Mapping[int, float]


@dataclass(frozen=True)
class DriftFile:
    """All readings of one process, of every run in a folder."""

    schema_version: int
    readings: tuple[DriftReading, ...]


_FILE = TypeAdapter(DriftFile)


def drift_path(folder: Path, rank: int) -> Path:
    """Path of the drift file, in its own folder: every JSON file beside it is the result of a setting."""
    return folder / "drift" / f"rank{rank}.json"


def read_drift(path: Path) -> tuple[DriftReading, ...]:
    """All readings of one process, of every run in this folder; none where there is no file.

    Raises:
        ResultsRefused: the file is not of this version.
    """
    if not path.exists():
        return ()
    content = read_versioned_object(path, "a file of drift readings", DRIFT_VERSION)
    try:
        return _FILE.validate_json(to_json(content), strict=True).readings
    except ValidationError as error:
        raise ResultsRefused(f"{path} {field_fault(error)}; move it away") from error


@dataclass
class ControlRuns:
    """Runs the control setting on this process's first samples that can be read, always the same ones."""

    config: MeasuringConfig
    context: RunContext
    bench: Bench
    control: Setting
    sample_ids: tuple[int, ...] = ()  #: those samples, once they are known

    def __call__(self) -> Totals:
        """Total seconds of one run of each sample, each after unmeasured ones.

        Raises:
            SettingError: the control setting cannot be run.
            Stopped: a stop was requested.
        """
        candidates = self.sample_ids or self.context.own_ids[:_MOST_CANDIDATES]
        totals: dict[int, float] = {}
        self.bench.model.apply(self.control)
        with out_of_memory_named():
            for sample_id in candidates:
                if len(totals) == CONTROL_SAMPLES:
                    break
                self.context.stop.raise_if_requested()
                try:
                    with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                        totals[sample_id] = self._total_s(sample_id, is_first=not totals)
                except SampleError:  # not counted: the sample is measured, and so recorded, at every setting
                    continue
        self.sample_ids = self.sample_ids or tuple(totals)
        return totals

    def _total_s(self, sample_id: int, is_first: bool) -> float:
        """The first sample warms up as before a setting, the others by one run for their own shape."""
        bench, config = self.bench, self.config
        least, most = (max(config.num_warmup_runs, 1), config.max_warmup_runs) if is_first else (1, 1)
        with time_limit(config.sample_timeout):
            _, request = bench.requests.take(sample_id, vision_of(self.control).bounds)
            inputs = bench.model.to_device(request.inputs)
        warm: list[float] = []
        while needs_another_run(warm, least, max(most, least)):
            with time_limit(config.sample_timeout):
                warm.append(run_staged(bench.model, inputs, bench.max_new_tokens).total_s)
        with time_limit(config.sample_timeout):
            return run_staged(bench.model, inputs, bench.max_new_tokens).total_s


@dataclass
class DriftCheck:
    """One process's readings of a run."""

    folder: Path
    context: RunContext
    control: str  #: key of the control setting
    every: int  #: settings between two readings; 0 takes none
    run_control: Callable[[], Totals]  #: one run of each control sample, in seconds by sample id
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._num_measured = 0
        self._first: Totals | None = None

    def begin(self) -> None:
        """The reading that all others of the run are compared with."""
        if self.every:
            self._read("start")

    def after(self, is_last: bool) -> None:
        """A setting is done, or has failed; read where it is time to."""
        self._num_measured += 1
        if self.every and (is_last or self._num_measured % self.every == 0):
            self._read("end" if is_last else "between")

    def _read(self, when: str) -> None:
        totals: Totals = {}
        reason: str | None = "none of this process's first samples can be read"
        try:
            totals = self.run_control()
        except SettingError as error:  # the check may fail, the run continues
            reason = f"{type(error).__name__}: {error}"
        if self._first is None and totals:
            self._first = totals
        ratio = drift_ratio(self._first, totals) if self._first is not None else None
        reading = DriftReading(
            experiment_id=self.context.experiment_id,
            rank=self.context.rank,
            when=when,
            num_settings_before=self._num_measured,
            wall_time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            since_start_s=self.clock() - self._began,
            control=self.control,
            sample_ids=tuple(totals),
            total_s=tuple(totals.values()),
            ratio=ratio,
            reason=None if totals else reason,
        )
        path = drift_path(self.folder, self.context.rank)
        write_json_atomically(asdict(DriftFile(DRIFT_VERSION, (*read_drift(path), reading))), path)

    def unfilled(self) -> list[Drift]:
        """The drift record of the setting that `after` got last, until `fill_in_drift` knows the readings."""
        if not self.every:
            return []
        return [
            Drift(
                rank=rank,
                control=self.control,
                num_settings_before=self._num_measured - 1,
                before=None,
                after=None,
                reason=NOT_CLOSED,
            )
            for rank in range(self.context.num_processes)
        ]


def fill_in_drift(folder: Path, ledger: Ledger, keys: Iterable[str]) -> None:
    """Write the readings around each of these settings into its result, where its run ended without doing so."""
    for key in keys:
        result = ledger.result(key)
        if result is None or all(each.reason != NOT_CLOSED for each in result.drift):
            continue
        path = ledger.result_path(key)
        assert path is not None
        run, provenance = result.provenance.experiment_id, result.provenance
        drift = [_filled_in(each, _readings_of_run(folder, each.rank, run)) for each in result.drift]
        found = drift_caveat(drift)
        if found is not None:
            provenance = provenance.with_caveats([found])
        save_setting_result(result.with_keys(drift=drift, provenance=provenance), path)


def wait_for_last_readings(
    folder: Path, ranks: Iterable[int], experiment_id: str, timeout_s: float, stop: StopRequest
) -> None:
    """Wait until each of these processes has written the reading that ends this run, or the time is over.

    Raises:
        Stopped: a stop was requested while waiting.
    """
    missing, deadline = set(ranks), time.monotonic() + timeout_s
    while missing and time.monotonic() < deadline:
        runs = {rank: _readings_of_run(folder, rank, experiment_id) for rank in missing}
        missing -= {rank for rank, readings in runs.items() if any(each.when == "end" for each in readings)}
        stop.raise_if_requested("while waiting for the other processes' last readings")
        time.sleep(_POLL_S if missing else 0.0)


def _readings_of_run(folder: Path, rank: int | None, experiment_id: str | None) -> list[DriftReading]:
    return [each for each in read_drift(drift_path(folder, rank or 0)) if each.experiment_id == experiment_id]


def _filled_in(entry: Drift, readings: Sequence[DriftReading]) -> Drift:
    """The ratios of the last reading before the setting and of the first after it."""
    place = entry.num_settings_before or 0
    before = [each for each in readings if each.num_settings_before <= place]
    after = [each for each in readings if each.num_settings_before > place]
    reasons = [] if before else ["no reading before it"]
    reasons += [] if after else ["no reading after it"]
    around = [*before[-1:], *after[:1]]
    reasons += [each.reason for each in around if each.ratio is None and each.reason is not None]
    return entry.with_keys(
        before=before[-1].ratio if before else None,
        after=after[0].ratio if after else None,
        reason="; ".join(reasons) or None,
    )


def drift_caveat(readings: Sequence[Drift]) -> Caveat | None:
    """The caveat for the ratio that is furthest from 1; None where none is more than 5 % off."""
    pairs = [pair for each in readings for pair in ((each.before, "before"), (each.after, "after"))]
    ratios = [(ratio, when) for ratio, when in pairs if ratio is not None]
    ratio, when = max(ratios, key=lambda each: abs(each[0] - 1), default=(1.0, ""))
    if abs(ratio - 1) <= DRIFT_LIMIT:
        return None
    return caveat("drift", ratio=ratio, when=when)
