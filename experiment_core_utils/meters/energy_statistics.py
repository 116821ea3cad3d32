"""Statistics of energies: error bounds, uncertainty, idle energy, sums over devices, closure and agreement of sources.

Nothing is clamped: a net energy or a residual may be negative.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from scipy.special import stdtrit

from experiment_core_utils.primitives.statistics import CONFIDENCE, describe, highest_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.energy import (
    ALL_DEVICES,
    PREFERRED_SOURCES,
    ActEnergy,
    Closure,
    DeviceEnergy,
    EnergyFigure,
    EnergyOrigin,
    EnergyWindow,
    IdlePower,
    WindowFigure,
)
from experiment_core_utils.records.text import InstrumentEnergy

# Shorter windows contain too few power readings to compare with a second source.
LEAST_WINDOW_S = 2.0


def quantisation_bound_j(tick_s: float, power_w: float) -> float:
    """Most by which a window that is not aligned to a counter's ticks can be off: |error| <= tick * power.

    What the counter shows is at most one tick old at both ends; the two errors have opposite signs.
    """
    return tick_s * power_w


def aligned_bound_j(open_jitter_s: float, close_jitter_s: float, act_s: float, power_w: float) -> float:
    """Most by which a window between two ticks, in which an act is repeated without a pause, can be off, in joules.

    Args:
        open_jitter_s, close_jitter_s: most by which the moment of each tick may be off.
        act_s: of one act: how far within an act the window begins and ends is known in time, not in energy, and the
            energy of the two pieces of acts is off by that of one act at most.
    """
    return (open_jitter_s + close_jitter_s + act_s) * power_w


def combined_uncertainty(values: Sequence[float], bound: float, baseline: float = 0.0) -> float | None:
    """Standard uncertainty of the mean of repeats: u^2 = s^2 / n + bound^2 + baseline^2; None for fewer than 2.

    For energies of an act, `bound` is tick * power / count: the whole bound counts as a standard deviation, and is not
    made smaller by repeats, so u errs on the large side. The sensor's own error, which all repeats share, is not in it.
    """
    if len(values) < 2:
        return None
    return math.sqrt(statistics.variance(values) / len(values) + bound**2 + baseline**2)


def expanded_interval(mean: float, half_of_spread: float, num_windows: int, uncertainty: float) -> tuple[float, float]:
    """95 % interval of a mean whose standard uncertainty includes a bound beside the spread over windows.

    Student's t times the uncertainty u, with the effective degrees of freedom of Welch and Satterthwaite, in which the
    bound counts as known exactly: (n - 1) * u^4 / (s / sqrt(n))^4 (JCGM 100:2008, G.4).

    Args:
        half_of_spread: of Student's t interval over the windows alone.
        num_windows: n, 2 or more.
    """
    of_spread = half_of_spread / float(stdtrit(num_windows - 1, 0.5 + CONFIDENCE / 2))
    freedom = (num_windows - 1) * (uncertainty / of_spread) ** 4 if of_spread > 0 else math.inf
    half = float(stdtrit(min(freedom, 1e9), 0.5 + CONFIDENCE / 2)) * uncertainty
    return mean - half, mean + half


def summed_reading(parts: Sequence[DeviceEnergy | ActEnergy]) -> DeviceEnergy:
    """One window's energy over all devices of one source; None where that of any is missing.

    Raises ValueError where the parts are of several sources.
    """
    missing = [f"{each.origin.device}: {each.reason}" for each in parts if each.joules is None]
    remarks = [f"{each.origin.device}: {each.remark}" for each in parts if each.remark is not None]
    return DeviceEnergy(
        common_origin([each.origin for each in parts]),
        sum_of_known([each.joules for each in parts]),
        sum_of_known([each.bound_j for each in parts]),
        "; ".join(missing) or None,
        "; ".join(remarks) or None,
    )


def summed_act(parts: Sequence[ActEnergy]) -> ActEnergy:
    """An act's energy over all devices of one source.

    Windows of several devices end at different ticks, so counts and lengths are means.
    """
    whole = summed_reading(parts)
    return ActEnergy(
        origin=whole.origin,
        joules=whole.joules,
        bound_j=whole.bound_j,
        act_s=mean_of_known([each.act_s for each in parts]),
        count=mean_of_known([each.count for each in parts]),
        window_s=mean_of_known([each.window_s for each in parts]),
        alignment="acts" if any(each.alignment == "acts" for each in parts) else "ticks",
        reason=whole.reason,
        remark=whole.remark,
        window_error=highest_of([each.window_error for each in parts]),
    )


def preferred_act(windows: Sequence[ActEnergy]) -> ActEnergy | None:
    """One window's energy over all devices by the best source that measured them all; None where none did."""
    for group in PREFERRED_SOURCES:
        found = [each for each in windows if source_group(each.origin) == group]
        if found and all(each.joules is not None for each in found):
            return summed_act(found)
    return None


def summed_idle(parts: Sequence[IdlePower]) -> IdlePower:
    """Idle power over all devices of one source; `watts` is None where that of any is missing."""
    missing = [f"{each.origin.device}: {each.reason}" for each in parts if each.watts is None]
    return IdlePower(
        common_origin([each.origin for each in parts]),
        sum_of_known([each.watts for each in parts]),
        sum_of_known([each.bound_w for each in parts]),
        parts[0].seconds,
        "; ".join(missing) or None,
    )


def common_origin(origins: Sequence[EnergyOrigin]) -> EnergyOrigin:
    """The origin of a sum: `device` "all" for more than one. Raises ValueError where anything else differs."""
    first = origins[0]
    if len(origins) == 1:
        return first
    sums = {replace(each, device=ALL_DEVICES) for each in origins}
    if len(sums) > 1:
        raise ValueError(f"energies of different sources are not added up: {sorted(map(str, sums))}")
    return sums.pop()


def sum_of_known(values: Sequence[float | None]) -> float | None:
    """Sum of the values; None where any is None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Mean of the values; None where any is None, or where there are none."""
    total = sum_of_known(values)
    return total / len(values) if total is not None and values else None


def energy_figure(windows: Sequence[ActEnergy], *idle: IdlePower | None) -> EnergyFigure:
    """Windows of one act on one device with one source, at least one, as a figure.

    The idle power is the mean of the readings that there are (before and after). Its uncertainty is half of their
    largest difference (the drift) and the larger of their bounds, in squares.
    """
    found = [each for each in windows if each.joules is not None]
    joules = [each.joules for each in found if each.joules is not None]
    act_s = mean_of_known([each.act_s for each in found])
    bound_j = _largest_of_known([each.bound_j for each in found])
    idle_w, idle_uncertainty_w = mean_idle(idle)
    idle_j, baseline_j = _energy_at(idle_w, act_s), _energy_at(idle_uncertainty_w, act_s)
    gross = describe(joules)
    return EnergyFigure(
        origin=windows[0].origin,
        gross_j=gross,
        uncertainty_j=_uncertainty(joules, bound_j, 0.0),
        idle_w=idle_w,
        idle_j=idle_j,
        net_j=None if gross is None or idle_j is None else gross.mean - idle_j,
        net_uncertainty_j=_uncertainty(joules, bound_j, baseline_j),
        act_s=act_s,
        count=sum_of_known([each.count for each in found]) if found else None,
        window_s=sum_of_known([each.window_s for each in found]) if found else None,
        num_windows=len(found),
        reason=_count_and_first(windows, [each.reason for each in windows if each.joules is None], " gave no figure"),
        remark=_count_and_first(windows, [each.remark for each in found if each.remark is not None]),
        window_error=highest_of([each.window_error for each in found]),
    )


def _uncertainty(joules: Sequence[float], bound_j: float | None, baseline_j: float | None) -> float | None:
    """The uncertainty of the windows' mean; None where a part of it is not known."""
    return None if bound_j is None or baseline_j is None else combined_uncertainty(joules, bound_j, baseline_j)


def _count_and_first(windows: Sequence[ActEnergy], message: Sequence[str | None], what: str = "") -> str | None:
    """How many of the windows have such a message, and the first of these."""
    return f"{len(message)} of {counted(len(windows), 'window')}{what}: {message[0]}" if message else None


def _largest_of_known(values: Sequence[float | None]) -> float | None:
    """The largest of them; None where any is None, or where there are none."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _energy_at(power_w: float | None, seconds: float | None) -> float | None:
    return None if power_w is None or seconds is None else power_w * seconds


def mean_idle(readings: Sequence[IdlePower | None]) -> tuple[float | None, float | None]:
    """Mean watts of the readings that there are, and their uncertainty: half of the drift and the larger bound, in
    squares; None where any of them has no bound."""
    found = [each for each in readings if each is not None and each.watts is not None]
    watts = [each.watts for each in found if each.watts is not None]
    bounds = [each.bound_w for each in found if each.bound_w is not None]
    if not watts:
        return None, None
    mean = statistics.fmean(watts)
    if len(bounds) < len(watts):
        return mean, None
    return mean, math.hypot((max(watts) - min(watts)) / 2, max(bounds))


def closure(end_to_end: EnergyFigure, stages: Mapping[str, EnergyFigure]) -> Closure:
    """End-to-end less the sum of the stages; windows are independent of each other, so their uncertainties add in
    squares."""
    missing = [
        f"{name}: {figure.reason or 'no windows'}"
        for name, figure in {"end_to_end": end_to_end, **stages}.items()
        if figure.gross_j is None
    ]
    whole = None if end_to_end.gross_j is None else end_to_end.gross_j.mean
    stages_j = sum_of_known([None if each.gross_j is None else each.gross_j.mean for each in stages.values()])
    residual = None if whole is None or stages_j is None else whole - stages_j
    uncertain = [each.uncertainty_j for each in (end_to_end, *stages.values())]
    known = [value for value in uncertain if value is not None]
    return Closure(
        origin=end_to_end.origin,
        end_to_end_j=whole,
        stages_j=stages_j,
        residual_j=residual,
        residual_share=residual / whole if residual is not None and whole else None,
        uncertainty_j=math.hypot(*known) if len(known) == len(uncertain) else None,
        reason="; ".join(missing) or None,
    )


def act_figures(
    rounds: Sequence[Sequence[ActEnergy]], idle: Sequence[tuple[IdlePower, ...]]
) -> tuple[tuple[EnergyFigure, ...], float | None]:
    """Windows of one act as figures, and integrated power over counter of the GPUs.

    Args:
        rounds: each with a window by every source and device, in the same order.
        idle: readings of the idle power of each source and device.

    Returns:
        A figure for each source and device, and one for each source over its devices where they are several; the ratio
        is None where one of the two is missing.
    """
    totals = act_totals(rounds, idle)
    # The sum of one device is its own figure.
    sums = (each for number, each in totals.values() if number > 1)
    # With the idle power that the same source reports of the same device.
    idle_of = {readings[0].origin: readings for readings in reversed(idle)}
    by_source = zip(*rounds, strict=True)
    figures = (energy_figure(windows, *idle_of.get(windows[0].origin, ())) for windows in by_source)
    return (*figures, *sums), gpu_source_ratio(totals)


def act_totals(
    rounds: Sequence[Sequence[ActEnergy]], idle: Sequence[tuple[IdlePower, ...]]
) -> Mapping[tuple[str, str], tuple[int, EnergyFigure]]:
    """For each component and basis, the number of its devices and the figure of their sum, window by window."""
    totals = {}
    for component, basis in dict.fromkeys(source_group(each.origin) for each in rounds[0]):
        windows = [
            summed_act([each for each in window if source_group(each.origin) == (component, basis)])
            for window in rounds
        ]
        own = [readings for readings in idle if source_group(readings[0].origin) == (component, basis)]
        sums = (summed_idle(readings) for readings in zip(*own, strict=True))
        number = sum(source_group(each.origin) == (component, basis) for each in rounds[0])
        totals[component, basis] = (number, energy_figure(windows, *sums))
    return totals


def source_group(origin: EnergyOrigin) -> tuple[str, str]:
    """Component and basis: figures of one group are added up over devices."""
    return origin.component, origin.basis


def gpu_source_ratio(totals: Mapping[tuple[str, str], tuple[int, EnergyFigure]]) -> float | None:
    """Integrated power over counter of the GPUs; their devices have to be the same ones."""
    of_gpus = [(basis, num, each.gross_j) for (kind, basis), (num, each) in totals.items() if kind == "gpu"]
    counted = [(num, gross_j) for basis, num, gross_j in of_gpus if basis == "counter"]
    integrated = [(num, gross_j) for basis, num, gross_j in of_gpus if basis != "counter"]
    if len(counted) != 1 or len(integrated) != 1 or counted[0][0] != integrated[0][0]:
        return None
    first, second = counted[0][1], integrated[0][1]
    return second.mean / first.mean if first is not None and second is not None and first.mean else None


def instrument_energy(windows: Sequence[EnergyWindow], reason: str | None = None) -> InstrumentEnergy:
    """What the machine's counters and power readings say of all windows of an experiment.

    Args:
        reason: why there is no window, where there is none.
    """
    figures = window_figures(windows)
    unread = tuple(dict.fromkeys(gpu for window in windows for gpu in window.unread_gpus))
    counted, integrated = (None if unread else _gpu_total(figures, is_counter) for is_counter in (True, False))
    counted_j, integrated_j = (None if total is None else total.gross_j for total in (counted, integrated))
    shown = integrated if counted_j is None else counted
    idle_j, net_j, uncertainty_j = (
        (None, None, None) if shown is None else (shown.idle_j, shown.net_j, shown.uncertainty_j)
    )
    reasons = [reason, *_reasons(windows, figures, unread)]
    return InstrumentEnergy(
        gpu_counter_j=counted_j,
        gpu_power_integral_j=integrated_j,
        gpu_source_ratio=_ratio(figures, counted, integrated),
        gpu_idle_j=idle_j,
        gpu_net_j=net_j,
        gpu_uncertainty_j=uncertainty_j,
        instruments=[asdict(figure) for figure in figures],
        instruments_reason="; ".join(dict.fromkeys(each for each in reasons if each is not None)) or None,
    )


def _reasons(
    windows: Sequence[EnergyWindow], figures: Sequence[WindowFigure], unread: Sequence[str]
) -> list[str | None]:
    """Why windows, sums or sources have no figure."""
    # A window without a reading has the missing sources in its reason.
    measured = [window for window in windows if window.reading is not None]
    missing = {name: why for window in measured for name, why in window.missing.items()}
    no_sum = f"no sum over GPUs: nothing is read of {', '.join(unread)}" if unread and measured else None
    return [
        *(window.reason for window in windows),
        no_sum,
        *(figure.reason for figure in figures),
        *(f"{name}: {why}" for name, why in missing.items()),
    ]


def window_figures(windows: Sequence[EnergyWindow]) -> tuple[WindowFigure, ...]:
    """One figure for each source and device, and one for each source over its devices where they are several.

    A source that some windows lack has no figure: the sum of the others would pass for that of all. Nor is there one
    over GPUs where one of them is not read.
    """
    by_origin: dict[EnergyOrigin, list[WindowFigure]] = {}
    for window in windows:
        energies = () if window.reading is None else window.reading.devices
        groups: dict[tuple[str, str], list[DeviceEnergy]] = {}
        for energy in energies:
            if energy.origin.component != "gpu" or not window.unread_gpus:
                groups.setdefault(source_group(energy.origin), []).append(energy)
        # The sum of one device is its own figure.
        for parts in (*([energy] for energy in energies), *(each for each in groups.values() if len(each) > 1)):
            figure = _window_figure(window, parts)
            by_origin.setdefault(figure.origin, []).append(figure)
    return tuple(_added(figures, len(windows)) for figures in by_origin.values())


def _window_figure(window: EnergyWindow, parts: Sequence[DeviceEnergy]) -> WindowFigure:
    """The energy of one source in a window, on a device or summed over several."""
    assert window.reading is not None
    energy, seconds = parts[0] if len(parts) == 1 else summed_reading(parts), window.reading.seconds
    origins = [part.origin for part in parts]
    readings = [[each for each in idle if each.origin in origins] for idle in (window.idle_before, window.idle_after)]
    idle_w, idle_uncertainty_w = mean_idle([summed_idle(idle) for idle in readings if len(idle) == len(parts)])
    idle_j, uncertain_j = _energy_at(idle_w, seconds), _energy_at(idle_uncertainty_w, seconds)
    return WindowFigure(
        origin=energy.origin,
        seconds=seconds,
        gross_j=energy.joules,
        uncertainty_j=energy.bound_j,
        idle_j=idle_j,
        net_j=None if energy.joules is None or idle_j is None else energy.joules - idle_j,
        net_uncertainty_j=None
        if energy.bound_j is None or uncertain_j is None
        else math.hypot(energy.bound_j, uncertain_j),
        reason=energy.reason,
        remark=energy.remark,
    )


def _added(figures: Sequence[WindowFigure], num_windows: int) -> WindowFigure:
    """Add up the energies of one source, one for each window that has it."""
    if len(figures) == num_windows == 1:
        return figures[0]
    num_missing = num_windows - len(figures)
    missing = f"{num_missing} of {counted(num_windows, 'window')} lack it" if num_missing else ""
    reasons = [missing, *(each.reason or "" for each in figures)]
    remarks = [each.remark for each in figures if each.remark is not None]
    energies = ("gross_j", "uncertainty_j", "idle_j", "net_j", "net_uncertainty_j")
    return WindowFigure(
        origin=figures[0].origin,
        seconds=math.fsum(each.seconds for each in figures),
        **{name: None if missing else sum_of_known([getattr(each, name) for each in figures]) for name in energies},
        reason="; ".join(each for each in reasons if each) or None,
        remark="; ".join(dict.fromkeys(remarks)) or None,
    )


def _gpu_figures(figures: Sequence[WindowFigure], is_counter: bool) -> list[WindowFigure]:
    of_gpus = [each for each in figures if each.origin.component == "gpu"]
    return [each for each in of_gpus if (each.origin.basis == "counter") is is_counter]


def _gpu_total(figures: Sequence[WindowFigure], is_counter: bool) -> WindowFigure | None:
    """Total over all GPUs: the sum, which comes last, or the only one's; None where GPUs report different readings, or
    one of them none of this kind: the sum of the others would pass for that of all."""
    found = _gpu_figures(figures, is_counter)
    others = _gpu_figures(figures, not is_counter)
    missing = {each.origin.device for each in others} - {each.origin.device for each in found} - {ALL_DEVICES}
    if not found or missing or len({each.origin.basis for each in found}) > 1:
        return None
    return found[-1]


def _ratio(
    figures: Sequence[WindowFigure], counted: WindowFigure | None, integrated: WindowFigure | None
) -> float | None:
    """Integrated power over counter; None where the GPUs of the two are not the same ones."""
    if counted is None or integrated is None or counted.gross_j is None or integrated.gross_j is None:
        return None
    devices = [{each.origin.device for each in _gpu_figures(figures, is_counter)} for is_counter in (True, False)]
    return integrated.gross_j / counted.gross_j if devices[0] == devices[1] and counted.gross_j else None


Energy = TypeVar("Energy", DeviceEnergy, ActEnergy)


def with_disagreements(energies: Sequence[Energy], apart_fraction: float = 0.0) -> tuple[Energy, ...]:
    """A remark at the counter and at the integrated power of a device where they differ by more than their bounds.

    The bounds are of resolution in time; what is beyond them is the sensors' own, or power that changes in step with
    the readings. Where a bound is not known nothing is said.

    Args:
        apart_fraction: of the energy, that the two windows are apart.
    """
    counters = {each.origin.device: each for each in energies if each.origin.basis == "counter"}
    powers = {each.origin.device: each for each in energies if each.origin.basis != "counter"}
    found = {each: _disagreement(counters[each], powers[each], apart_fraction) for each in counters.keys() & powers}
    return tuple(_remarked(each, found.get(each.origin.device)) for each in energies)


def _disagreement(counted: Energy, integrated: Energy, apart_fraction: float) -> str | None:
    if not counted.joules or integrated.joules is None or counted.bound_j is None or integrated.bound_j is None:
        return None
    off_j = integrated.joules - counted.joules
    explained_j = counted.bound_j + integrated.bound_j + apart_fraction * abs(counted.joules)
    if abs(off_j) <= explained_j:
        return None
    off, explained = off_j / counted.joules, explained_j / abs(counted.joules)
    return f"integrated power is {off:+.1%} off the counter, of which resolution explains {explained:.1%}"


def _remarked(energy: Energy, remark: str | None) -> Energy:
    if remark is None:
        return energy
    return replace(energy, remark=remark if energy.remark is None else f"{energy.remark}; {remark}")
