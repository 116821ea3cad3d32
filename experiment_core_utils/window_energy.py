"""In: an experiment's windows by the machine's own instruments; out: its energy by source and device. Pure.

Joules add up over windows and devices; nothing is clamped.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict

from experiment_core_utils.meters.energy_statistics import mean_idle, sum_of_known, summed_idle, summed_reading
from experiment_core_utils.primitives.energy_records import (
    ALL_DEVICES,
    DeviceEnergy,
    EnergyOrigin,
    EnergyWindow,
    IdlePower,
    WindowFigure,
)
from experiment_core_utils.primitives.records import InstrumentEnergy

Idle = tuple[IdlePower | None, IdlePower | None]


def instrument_energy(windows: Sequence[EnergyWindow], reason: str | None = None) -> InstrumentEnergy:
    """What the machine's counters and power readings say of all windows of an experiment.

    Args:
        reason: why there is no window, where there is none.
    """
    figures = window_figures(windows)
    unread = tuple(dict.fromkeys(gpu for window in windows for gpu in window.unread_gpus))
    counted, integrated = (None if unread else _gpu_total(figures, is_counter) for is_counter in (True, False))
    counted_j, integrated_j = _gross_j(counted), _gross_j(integrated)
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


def _gross_j(total: WindowFigure | None) -> float | None:
    return None if total is None else total.gross_j


def _reasons(
    windows: Sequence[EnergyWindow], figures: Sequence[WindowFigure], unread: Sequence[str]
) -> list[str | None]:
    """Why windows, sums or sources have no figure."""
    # A window without a reading has the missing sources in its reason.
    measured = [window for window in windows if window.reading is not None]
    missing = {name: why for window in measured for name, why in window.missing.items()}
    lacking = f"no sum over GPUs: nothing is read of {', '.join(unread)}" if unread and measured else None
    return [
        *(window.reason for window in windows),
        lacking,
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
        for figure in _figures_of(window) if window.reading is not None else ():
            by_origin.setdefault(figure.origin, []).append(figure)
    return tuple(_added(figures, len(windows)) for figures in by_origin.values())


def _figures_of(window: EnergyWindow) -> list[WindowFigure]:
    assert window.reading is not None
    seconds = window.reading.seconds
    figures = [_figure(energy, seconds, _idle_of(window, energy.origin)) for energy in window.reading.devices]
    groups: dict[tuple[str, str], list[DeviceEnergy]] = {}
    for energy in window.reading.devices:
        if energy.origin.component == "gpu" and window.unread_gpus:
            continue
        groups.setdefault((energy.origin.component, energy.origin.basis), []).append(energy)
    for parts in groups.values():
        if len(parts) > 1:
            pairs = [_idle_of(window, energy.origin) for energy in parts]
            idle = (_summed([before for before, _ in pairs]), _summed([after for _, after in pairs]))
            figures.append(_figure(summed_reading(parts), seconds, idle))
    return figures


def _idle_of(window: EnergyWindow, origin: EnergyOrigin) -> Idle:
    before = next((each for each in window.idle_before if each.origin == origin), None)
    return before, next((each for each in window.idle_after if each.origin == origin), None)


def _summed(parts: Sequence[IdlePower | None]) -> IdlePower | None:
    known = [each for each in parts if each is not None]
    return summed_idle(known) if len(known) == len(parts) else None


def _figure(energy: DeviceEnergy, seconds: float, idle: Idle) -> WindowFigure:
    idle_w, idle_uncertainty_w = mean_idle(idle)
    idle_j = None if idle_w is None else idle_w * seconds
    uncertain = None if idle_uncertainty_w is None else idle_uncertainty_w * seconds
    return WindowFigure(
        origin=energy.origin,
        seconds=seconds,
        gross_j=energy.joules,
        uncertainty_j=energy.bound_j,
        idle_j=idle_j,
        net_j=None if energy.joules is None or idle_j is None else energy.joules - idle_j,
        net_uncertainty_j=None
        if energy.bound_j is None or uncertain is None
        else math.hypot(energy.bound_j, uncertain),
        reason=energy.reason,
        remark=energy.remark,
    )


def _added(figures: Sequence[WindowFigure], num_windows: int) -> WindowFigure:
    """Those of one source, one for each window that has it."""
    if len(figures) == num_windows == 1:
        return figures[0]
    first = figures[0]
    lacking = "" if len(figures) == num_windows else f"{num_windows - len(figures)} of {num_windows} windows lack it"
    reasons = [lacking, *(each.reason or "" for each in figures)]
    remarks = [each.remark for each in figures if each.remark is not None]

    def total(values: Sequence[float | None]) -> float | None:
        return None if lacking else sum_of_known(values)

    return WindowFigure(
        origin=first.origin,
        seconds=math.fsum(each.seconds for each in figures),
        gross_j=total([each.gross_j for each in figures]),
        uncertainty_j=total([each.uncertainty_j for each in figures]),
        idle_j=total([each.idle_j for each in figures]),
        net_j=total([each.net_j for each in figures]),
        net_uncertainty_j=total([each.net_uncertainty_j for each in figures]),
        reason="; ".join(each for each in reasons if each) or None,
        remark="; ".join(dict.fromkeys(remarks)) or None,
    )


def _gpu_figures(figures: Sequence[WindowFigure], is_counter: bool) -> list[WindowFigure]:
    of_gpus = [each for each in figures if each.origin.component == "gpu"]
    return [each for each in of_gpus if (each.origin.basis == "counter") is is_counter]


def _gpu_total(figures: Sequence[WindowFigure], is_counter: bool) -> WindowFigure | None:
    """Over all GPUs: the sum, which comes last, or the only one's; None where GPUs tell different readings, or one of
    them none of this kind: the sum of the others would pass for that of all."""
    found = _gpu_figures(figures, is_counter)
    others = _gpu_figures(figures, not is_counter)
    lacking = {each.origin.device for each in others} - {each.origin.device for each in found} - {ALL_DEVICES}
    if not found or lacking or len({each.origin.basis for each in found}) > 1:
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
