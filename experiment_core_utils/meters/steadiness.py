"""The steadiness of a setting's measurement: order, warm-up, conditions and precision."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeVar

from experiment_core_utils.meters.nvml import THROTTLING
from experiment_core_utils.primitives.statistics import highest_of, rate, relative_half_width
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.records.caveats import MOST_DISTURBED, MOST_FAILED
from experiment_core_utils.records.setting_result import (
    CommonFactor,
    Conditions,
    OpenLoop,
    Order,
    Precision,
    Rounds,
    SteadinessPart,
    WarmUpRuns,
)
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ConditionsReading,
    FinishedSample,
    MeasuredSetting,
    MeasuringOrder,
    RoundsTrace,
    WarmUp,
)

T = TypeVar("T")
Span = tuple[ConditionsReading, ConditionsReading]
# Load of others above which, and time with clocks held down above which, a result carries a caveat.
BACKGROUND_LOAD = 0.10
THROTTLED_FRACTION = 0.01
# The host counts its CPUs' time in hundredths of a second, so that a short window says nothing of 10 %.
SHORTEST_LOAD_S = 0.5


def steadiness_part(
    key: str,
    order: MeasuringOrder,
    until_precision: float | None,
    merged: MeasuredSetting,
    *,
    is_stopped: bool = False,
) -> SteadinessPart:
    """Order, warm-up, conditions and precision of a setting."""
    return SteadinessPart.of(
        setting_order=order_of(key, order),
        rounds=[rounds_of(each) for each in merged.rounds],
        open_loop=open_loop_of(merged.arrivals),
        warmup=[warmup_of(each) for each in merged.warmups],
        conditions=conditions_of(merged.conditions),
        precision=precision_of(until_precision, merged, is_stopped=is_stopped),
    )


def order_of(key: str, order: MeasuringOrder) -> Order | None:
    """The setting's place, counted from 0; None where it is not part of the plan."""
    if key not in order.keys:
        return None
    return Order(how=order.how, seed=order.seed, position=order.keys.index(key), num_settings=len(order.keys))


def rounds_of(trace: RoundsTrace) -> Rounds:
    """What the rounds of one process in one run showed."""
    low, high = trace.factors or (None, None)
    return Rounds(
        rank=trace.rank,
        experiment_id=trace.experiment_id,
        num_settings=trace.num_settings,
        num_rounds=trace.num_rounds,
        samples_per_round=trace.group_size,
        seed=trace.seed,
        common_factor=CommonFactor(min=low, max=high, last_over_first=trace.closing_factor),
        switch_ms=milliseconds(trace.switch_s),
    )


def open_loop_of(batches: Sequence[ArrivalsTrace]) -> OpenLoop | None:
    """How the server kept up in all batches together; None where there was none.

    The achieved rate is of the middle of each batch, so that answers of several lengths do not make it smaller.
    """
    if not batches:
        return None
    in_turn = rate(sum(each.due_span_s for each in batches), sum(each.answered_span_s for each in batches))
    return OpenLoop(
        request_rate=batches[0].request_rate,
        achieved_rate=None if in_turn is None else batches[0].request_rate * in_turn,
        num_batches=len(batches),
        num_requests=sum(each.num_requests for each in batches),
        num_answered=sum(each.num_answered for each in batches),
        most_under_way=max(each.most_under_way for each in batches),
        num_late=sum(each.num_late for each in batches),
        late_max_ms=milliseconds(highest_of([each.late_max_s for each in batches])),
    )


def warmup_of(warmup: WarmUp) -> WarmUpRuns:
    """One process's warm-up in one run."""
    return WarmUpRuns.of(
        rank=warmup.rank,
        experiment_id=warmup.experiment_id,
        num_runs=len(warmup.total_s),
        is_stable=warmup.is_stable,
        spread_of_last_3=warmup.spread,
        T_total=[milliseconds(total) for total in warmup.total_s],
    )


def precision_of(until_precision: float | None, merged: MeasuredSetting, *, is_stopped: bool = False) -> Precision:
    """How well the mean total time is known, and why no more samples were requested."""
    of_samples = "precision" if merged.num_stopped_early else "num_samples"
    means = [(sample.mean_total_s, sample.image_id) for sample in merged.samples]
    timed = [(total_s, picture) for total_s, picture in means if total_s is not None]
    return Precision.of(
        asked=until_precision,
        reached=relative_half_width([total for total, _ in timed], [picture for _, picture in timed]),
        stopped_by="stopped" if is_stopped else of_samples,
        num_processes_stopped=merged.num_stopped_early,
    )


def conditions_of(readings: Sequence[ConditionsReading]) -> list[Conditions]:
    """Conditions around the samples, one entry for each process and run, in the order in which they are met."""
    groups: dict[tuple[int, str], list[ConditionsReading]] = defaultdict(list)
    for reading in readings:
        groups[reading.rank, reading.experiment_id].append(reading)
    return [process_conditions(group) for group in groups.values()]


def process_conditions(readings: Sequence[ConditionsReading]) -> Conditions:
    """One process's readings in one run, in order of time; each `open` begins a window of its own."""
    first = readings[0]
    spans = [(a, b) for a, b in pairwise(readings) if b.when != "open"]
    gpus = _known(reading.gpu for reading in readings)
    opened = _known(reading.gpu for reading in readings if reading.when == "open")
    reasons = {*_known(reading.gpu_reason for reading in readings), *_known(gpu.reason for gpu in gpus)}
    throttle_reasons = _known(gpu.throttle_reasons for gpu in gpus)
    return Conditions.of(
        rank=first.rank,
        experiment_id=first.experiment_id,
        opened=first.wall_time,
        num_readings=len(readings),
        window_s=sum(b.monotonic_s - a.monotonic_s for a, b in spans),
        sm_clock_mhz=_ends(gpu.sm_clock_mhz for gpu in gpus),
        memory_clock_mhz=_ends(gpu.memory_clock_mhz for gpu in gpus),
        temperature_c_max=highest_of([gpu.temperature_c for gpu in gpus]),
        power_w_max=highest_of([gpu.power_w for gpu in gpus]),
        throttle_reasons=sorted({*chain(*throttle_reasons)}) if throttle_reasons else None,
        power_throttled_s=_increase(spans, "power_throttled_s"),
        thermal_throttled_s=_increase(spans, "thermal_throttled_s"),
        utilisation_percent_at_open=highest_of([gpu.utilisation_percent for gpu in opened]),
        foreign_gpu_processes_max=highest_of([gpu.foreign_processes for gpu in gpus]),
        foreign_gpu_memory_bytes_max=highest_of([gpu.foreign_memory_bytes for gpu in gpus]),
        gpu_reason="; ".join(sorted(reasons)) or None,
        foreign_cpu_share=_background_cpu_fraction(spans),
        cpu_frequency_mhz=_ends(reading.cpu.frequency_mhz for reading in readings),
    )


def disturbances(before: ConditionsReading, after: ConditionsReading) -> tuple[str, ...]:
    """What disturbed the runs between two readings: reasons of throttling, and `other load` of the CPUs.

    Load is not known in less than SHORTEST_LOAD_S.
    """
    entry = process_conditions([before, after])
    is_loaded = entry.window_s >= SHORTEST_LOAD_S and (entry.foreign_cpu_share or 0.0) > BACKGROUND_LOAD
    return (*throttling_of(entry), *(("other load",) if is_loaded else ()))


@dataclass
class Outlook:
    """Whether a run is certain to be INVALID before it ends, by samples that cannot be undone; each kind is said once.

    A fraction that is too large already cannot become smaller: of `num_timed` and `num_samples` there are at most so
    many in the end. So rounds are repeated in vain for at most MOST_DISTURBED of the samples of a run.

    Args:
        num_timed: timed samples of a setting, of all processes.
        num_samples: samples of a setting, of all processes.
    """

    num_timed: int
    num_samples: int
    kinds: set[str] = field(default_factory=set)  #: what makes it INVALID: `disturbed`, `failed`

    def look(self, key: str, finished: Collection[FinishedSample], say: Callable[[str], None]) -> None:
        """Look at the finished samples of a setting, and say a line about what has become certain by them."""
        measured = [each.measured for each in finished if each.measured is not None]
        disturbed = sum(bool(each.disturbances) for each in measured)
        failed = len(finished) - len(measured)
        if disturbed > MOST_DISTURBED * self.num_timed and "disturbed" not in self.kinds:
            what = ", ".join(dict.fromkeys(name for each in measured for name in each.disturbances))
            say(
                f"this run will be INVALID: {disturbed} of {counted(self.num_timed, 'timed sample')} of {key} "
                f"disturbed ({what}); rounds are no longer repeated; end what disturbs it, measure into a new folder"
            )
            self.kinds.add("disturbed")
        if failed > MOST_FAILED * self.num_samples and "failed" not in self.kinds:
            first = next(each.failed for each in finished if each.failed is not None)
            say(
                f"this run will be INVALID: {failed} of {counted(self.num_samples, 'sample')} of {key} failed, the "
                f"first with: {first.reason}; repair them, or leave them out by --ids"
            )
            self.kinds.add("failed")


def throttling_of(entry: Conditions) -> list[str]:
    """Why the GPU was slower than it could be: reasons seen at a reading, or clocks held down between readings."""
    found = [name for name in entry.throttle_reasons or () if name in THROTTLING]
    for name, held_s in (("power", entry.power_throttled_s), ("thermal", entry.thermal_throttled_s)):
        if held_s is not None and held_s > THROTTLED_FRACTION * entry.window_s:
            found.append(f"{name} limit")
    return found


def _background_cpu_fraction(spans: Sequence[Span]) -> float | None:
    """Busy time of the host's CPUs that was not the run's own, as a fraction of all; None where it is not known."""
    total_s = sum(b.cpu.total_s - a.cpu.total_s for a, b in spans)
    own = [(a.cpu.own_s, b.cpu.own_s) for a, b in spans]
    known = [after - before for before, after in own if before is not None and after is not None]
    if len(known) < len(own):
        return None
    background_s = sum(b.cpu.busy_s - a.cpu.busy_s for a, b in spans) - sum(known)
    return min(max(background_s / total_s, 0.0), 1.0) if total_s > 0 else None


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _ends(values: Iterable[float | None]) -> list[float] | None:
    known = _known(values)
    return [min(known), max(known)] if known else None


def _increase(spans: Sequence[Span], figure: str) -> float | None:
    """The increase of a figure of the GPU that only grows, over the spans at both ends of which it is known."""
    ends = [[getattr(each.gpu, figure, None) for each in span] for span in spans]
    known = [after - before for before, after in ends if before is not None and after is not None]
    return sum(known) if known else None
