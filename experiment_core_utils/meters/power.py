"""Power readings taken beside the running code, and the energy of windows and their parts by the trapezoid rule."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from experiment_core_utils.meters.interface import PowerProbe
from experiment_core_utils.primitives.clock import Clock, Repeating
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import (
    ActEnergy,
    AllocatedJoules,
    DeviceEnergy,
    EnergyReading,
    PowerTrace,
)
from experiment_core_utils.records.text import PartEnergy, all_absent

SAMPLE_EVERY_S = 0.05
# Share of the interval by which one may be shorter or longer. With a half, what repeats itself with the interval is met
# at every moment of its period alike.
JITTER = 0.5
JITTER_SEED = 42
# A trace with more failed readings than this fraction of all says too little of what lies between them.
FAILED_LIMIT = 0.1
# Times the usual interval: a reading may come late, or fail once.
MOST_GAP = 4
NOT_REQUESTED = "energy was not requested"
ESTIMATE_TOO_COARSE = (
    "nothing measures energy here, and codecarbon's estimate reads the load about once a second, too coarse for one "
    "run: it is of whole windows alone"
)


def trapezoid_j(
    times_s: Sequence[float], watts: Sequence[float], begin_s: float, end_s: float, has_steps_at_ends: bool = False
) -> tuple[float, float]:
    """Energy between two moments from power readings, and a bound of its error, both in joules.

    Power is interpolated linearly between readings and stays as it was outside them. The bound holds where the power
    between two readings lies between those readings: half of |step| * time, summed over the steps. Power that swings
    faster than it is read is met by chance: the integral is right on average, not within this bound for certain.

    Args:
        times_s: ascending, at least one.
        has_steps_at_ends: something begins to run at `begin_s` and ends at `end_s`: from either end to the next reading
            inside, where there is one, power is as at that reading, and its whole step * time goes into the bound.
    """
    times, power = np.asarray(times_s, dtype=np.float64), np.asarray(watts, dtype=np.float64)
    inside = (times > begin_s) & (times < end_s)
    at = np.concatenate(([begin_s], times[inside], [end_s]))
    values = np.interp(at, times, power)
    steps = np.diff(at)
    bounds = steps * np.abs(np.diff(values)) / 2
    if has_steps_at_ends and inside.any():
        values[0], values[-1] = values[1], values[-2]
        bounds[[0, -1]] *= 2
    return float((steps * (values[1:] + values[:-1])).sum() / 2), float(bounds.sum())


def jittered(interval_s: float, random: Random) -> Iterator[float]:
    """Intervals spread evenly around this one by `JITTER`, which is their mean.

    Readings at equal distances of something that repeats itself at that distance meet the same moment of it each time,
    and what is drawn at all others is in no reading.
    """
    while True:
        yield interval_s * random.uniform(1 - JITTER, 1 + JITTER)


@dataclass
class _Readings:
    """Power readings of one device so far; fields as of `PowerTrace`."""

    times_s: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    num_failed: int = 0
    last_failed: bool = False
    failure: str | None = None


class PowerSampler:
    """Reads power of devices at once, then again and again beside the running code, and once more at the stop.

    Args:
        intervals: seconds from one reading to the next, endless; None for the usual ones.
    """

    def __init__(self, probes: Sequence[PowerProbe], clock: Clock, intervals: Iterator[float] | None = None) -> None:
        self._probes = tuple(probes)
        self._clock = clock
        self._intervals = intervals or jittered(SAMPLE_EVERY_S, Random(JITTER_SEED))
        self._repeating: Repeating | None = None
        self._readings = [_Readings() for _ in self._probes]

    def start(self) -> None:
        """Begin a trace."""
        self._readings = [_Readings() for _ in self._probes]
        self._sample()
        self._repeating = self._clock.every(self._intervals, self._sample)

    def stop(self) -> tuple[PowerTrace, ...]:
        """End the sampling; returns a trace of each probe. Raises what a reading raised, unless MeterUnavailable."""
        if self._repeating is not None:
            repeating, self._repeating = self._repeating, None
            repeating.stop()
            self._sample()
        return tuple(
            PowerTrace(probe.origin, tuple(own.times_s), tuple(own.watts), own.num_failed, own.last_failed, own.failure)
            for probe, own in zip(self._probes, self._readings, strict=True)
        )

    def _sample(self) -> None:
        for probe, own in zip(self._probes, self._readings, strict=True):
            started_s = self._clock.now_s()
            try:
                watts = probe.read_w()
            except MeterUnavailable as error:
                own.num_failed, own.last_failed, own.failure = own.num_failed + 1, True, str(error)
                continue
            own.times_s.append((started_s + self._clock.now_s()) / 2)
            own.watts.append(watts)
            own.last_failed = False


def energy_of_trace(trace: PowerTrace, begin_s: float, end_s: float, has_steps_at_ends: bool = False) -> DeviceEnergy:
    """Energy of a device between two moments; None where it was gone at the end, failed too often, or where the
    readings say nothing of the window: none lies in it, or some are missing around it.

    `has_steps_at_ends` is that of `trapezoid_j`.
    """
    failed, taken = trace.num_failed, len(trace.times_s)
    if trace.last_failed or not taken:
        return DeviceEnergy(trace.origin, None, None, f"power could not be read at the close: {trace.failure}")
    fraction = failed / (failed + taken)
    if fraction > FAILED_LIMIT:
        reason = f"{failed} of {failed + taken} power readings failed: {trace.failure}"
        return DeviceEnergy(trace.origin, None, None, reason)
    missing = _missing_reason(trace.times_s, begin_s, end_s)
    if missing is not None:
        failures = f" ({trace.failure})" if failed else ""
        return DeviceEnergy(trace.origin, None, None, f"{missing}{failures}")
    # A long run has many windows: the readings inside this one, and the one to either side.
    near = slice(max(bisect_right(trace.times_s, begin_s) - 1, 0), bisect_left(trace.times_s, end_s) + 1)
    joules, bound_j = trapezoid_j(trace.times_s[near], trace.watts[near], begin_s, end_s, has_steps_at_ends)
    remark = f"{failed} of {failed + taken} power readings failed ({trace.failure})" if failed else None
    return DeviceEnergy(trace.origin, joules, bound_j, None, remark)


def _missing_reason(times_s: Sequence[float], begin_s: float, end_s: float) -> str | None:
    """Why the readings say nothing of a window; None where they do."""
    first, last = bisect_right(times_s, begin_s), bisect_left(times_s, end_s)
    if first >= last:
        return f"there is no power reading in a window of {end_s - begin_s:.3g} s"
    times = np.asarray(times_s, dtype=np.float64)
    # Where the trace does not reach beyond an end, nothing is read from there on.
    before = [begin_s] if first == 0 else []
    after = [end_s] if last == len(times) else []
    gap_s = float(np.diff([*before, *times[max(first - 1, 0) : last + 1], *after]).max())
    usual_s = float(np.median(np.diff(times))) if len(times) > 1 else gap_s
    if gap_s > MOST_GAP * usual_s:
        return f"power readings are missing: {gap_s:.3g} s lie between two, {usual_s:.3g} s as a rule"
    return None


class PowerIntegralMeter:
    """An `EnergyMeter` of power readings; see `PowerSampler`.

    Raises:
        MeterUnavailable: a probe cannot be read now.
    """

    def __init__(self, probes: Sequence[PowerProbe], clock: Clock, intervals: Iterator[float] | None = None) -> None:
        self._clock = clock
        self._sampler = PowerSampler(probes, clock, intervals)
        self._started_s: float | None = None
        for probe in probes:
            probe.read_w()

    def open(self) -> None:
        """Power is read before the window begins."""
        if self._started_s is not None:
            raise ConfigurationError("this energy meter has an open window; close it before opening another")
        self._sampler.start()
        self._started_s = self._clock.now_s()

    def close(self) -> EnergyReading:
        """Power is read after the window has ended."""
        if self._started_s is None:
            raise ConfigurationError("this energy meter has no open window; open one before closing")
        started_s, ended_s = self._started_s, self._clock.now_s()
        self._started_s = None
        traces = self._sampler.stop()
        energies = (energy_of_trace(each, started_s, ended_s, has_steps_at_ends=True) for each in traces)
        return EnergyReading(ended_s - started_s, tuple(energies))

    def release(self) -> None:
        self._started_s = None
        self._sampler.stop()


def energy_of_part(traces: Sequence[PowerTrace], begin_s: float, end_s: float, reason: str | None) -> PartEnergy:
    """Energy of all traced devices between two moments of the traces' clock; None where that of any is missing.

    Where devices report their power in several ways, source and basis name all of them, joined by "+".

    Args:
        reason: why there is no trace, where there is none.
    """
    parts = [energy_of_trace(trace, begin_s, end_s, has_steps_at_ends=True) for trace in traces]
    missing = [f"{part.origin.device}: {part.reason}" for part in parts if part.joules is None]
    if missing or not parts:
        return no_energy("; ".join(missing) or reason)
    return PartEnergy(
        energy_j=math.fsum(part.joules for part in parts if part.joules is not None),
        energy_bound_j=math.fsum(part.bound_j for part in parts if part.bound_j is not None),
        energy_method="apportioned",
        energy_source=_labels([part.origin.source for part in parts]),
        energy_basis=_labels([part.origin.basis for part in parts]),
        energy_reason=None,
    )


def energies_of_runs(trace: PowerTrace, runs: Sequence[Sequence[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Energy of each run, summed over its begins and ends, and a bound of its error, in joules, [N] and [N].

    For runs that follow each other without a pause and may be shorter than the time between two readings: between two
    readings power is taken as the mean of both, and the bound is their difference x time.
    """
    times, watts = np.asarray(trace.times_s), np.asarray(trace.watts)
    steps_s, changes_w = np.diff(times), np.abs(np.diff(watts))
    joules = np.concatenate(([0.0], np.cumsum(steps_s * (watts[1:] + watts[:-1]) / 2)))
    bounds = np.concatenate(([0.0], np.cumsum(steps_s * changes_w)))

    def between(totals: np.ndarray) -> np.ndarray:
        return np.array([np.diff(np.interp(np.asarray(spans), times, totals), axis=1).sum() for spans in runs])

    return between(joules), between(bounds)


def allocated_to_runs(
    total: ActEnergy | None, traces: Sequence[PowerTrace], runs: Sequence[Sequence[tuple[float, float]]]
) -> tuple[AllocatedJoules, ...]:
    """A window's energy of one pass over runs, divided among them so that the parts add up to it.

    In proportion to the power that was read while each ran; where no power of the window's devices was read, to how
    long each ran. The bound is that of the division, and the part of the window's own.

    Args:
        total: of one pass, over all devices; None where there is none.
        traces: power readings beside the window.
        runs: begin and end of each run in each pass.
    """
    if total is None or total.joules is None:
        reason = "the window has no energy" if total is None else total.reason
        return (AllocatedJoules(None, None, None, None, reason),) * len(runs)
    if total.origin.kind == "estimated":
        return (AllocatedJoules(None, None, None, total.origin, ESTIMATE_TOO_COARSE),) * len(runs)
    begin_s, end_s = min(spans[0][0] for spans in runs), max(spans[-1][1] for spans in runs)
    own = [each for each in traces if each.origin.component == total.origin.component]
    has_power = bool(own) and all(energy_of_trace(each, begin_s, end_s).joules is not None for each in own)
    if has_power:
        found = [energies_of_runs(each, runs) for each in own]
        weights, errors = (np.sum(each, axis=0) for each in zip(*found, strict=True))
    else:
        weights, errors = np.array([sum(end - begin for begin, end in spans) for spans in runs]), None
    whole = float(np.sum(weights))
    return tuple(
        AllocatedJoules(
            joules=total.joules * weight / whole,
            bound_j=None
            if errors is None or total.bound_j is None
            else (total.joules * float(errors[place]) + total.bound_j * weight) / whole,
            method="apportioned" if has_power else "apportioned by time",
            origin=total.origin,
            reason=None,
        )
        for place, weight in enumerate(map(float, weights))
    )


def _labels(names: Sequence[str]) -> str:
    return "+".join(dict.fromkeys(names))


def no_energy(reason: str | None) -> PartEnergy:
    """The energy of a part of which there is no figure."""
    return all_absent(PartEnergy, energy_reason=reason)


def allocated_to_query(batch_j: float | None, query_tokens: int, batch_tokens: int) -> float | None:
    """A query's part of its batch's energy: batch_j * query_tokens / batch_tokens, so that the parts add up.

    Tokens are true ones, input and output: padding and what a row computes after its end are spread over all queries
    of the batch. A rule, not a measurement: an output token costs more than an input token.
    """
    return None if batch_j is None else batch_j * query_tokens / batch_tokens
