"""In: energies of windows and acts; out: their error bounds, uncertainty, idle share, sums and closure. Pure.

Nothing is clamped: a net energy or a residual may be negative.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scipy.special import stdtrit

from experiment_core_utils.primitives.distributions import CONFIDENCE, describe
from experiment_core_utils.primitives.energy_records import (
    ALL_DEVICES,
    ActEnergy,
    Closure,
    DeviceEnergy,
    EnergyFigure,
    EnergyOrigin,
    IdlePower,
)

# Shorter windows hold too few power readings to tell anything of a second source.
LEAST_WINDOW_S = 2.0


def quantisation_bound_j(tick_s: float, power_w: float) -> float:
    """Most by which a window that is not aligned to a counter's ticks can be off: |error| <= tick * power.

    What the counter shows is at most one tick old at both ends; the two errors have opposite signs.
    """
    return tick_s * power_w


def aligned_bound_j(open_jitter_s: float, close_jitter_s: float, act_s: float, power_w: float) -> float:
    """The same for a window between two ticks in which an act is repeated without a pause.

    Args:
        open_jitter_s, close_jitter_s: most by which the moment of each tick may be off.
        act_s: of one act: how far within an act the window begins and ends is known in time, not in energy, and the
            energy of the two pieces of acts is off by that of one act at most.
    """
    return (open_jitter_s + close_jitter_s + act_s) * power_w


def window_for_error(uncertain_s: float, relative: float) -> float:
    """Length at which an error of `uncertain_s` at the window's power is `relative` of its energy."""
    return uncertain_s / relative


def combined_uncertainty(values: Sequence[float], bound: float, baseline: float = 0.0) -> float | None:
    """Standard uncertainty of the mean of repeats: u^2 = s^2 / n + bound^2 + baseline^2; None for fewer than 2.

    For energies of an act, `bound` is tick * power / count: the whole bound stands for a standard deviation, and is not
    made smaller by repeats, so u errs on the large side. The sensor's own error, which all repeats share, is not in it.
    """
    if len(values) < 2:
        return None
    return math.sqrt(statistics.variance(values) / len(values) + bound**2 + baseline**2)


def expanded_interval(mean: float, half_of_spread: float, num_windows: int, uncertainty: float) -> tuple[float, float]:
    """95 % interval of a mean whose standard uncertainty holds a bound beside the spread over windows.

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


def summed_reading(parts: Sequence[DeviceEnergy]) -> DeviceEnergy:
    """One window's energy over all devices of one source; None where that of any is missing.

    Raises ValueError where the parts are of several sources.
    """
    origin = common_origin([each.origin for each in parts])
    missing = [f"{each.origin.device}: {each.reason}" for each in parts if each.joules is None]
    remarks = [f"{each.origin.device}: {each.remark}" for each in parts if each.remark is not None]
    return DeviceEnergy(
        origin,
        None if missing else math.fsum(each.joules for each in parts if each.joules is not None),
        sum_of_known([each.bound_j for each in parts]),
        "; ".join(missing) or None,
        "; ".join(remarks) or None,
    )


def summed_act(parts: Sequence[ActEnergy]) -> ActEnergy:
    """The same for an act. Windows of several devices end at different ticks, so counts and lengths are means."""
    origin = common_origin([each.origin for each in parts])
    missing = [f"{each.origin.device}: {each.reason}" for each in parts if each.joules is None]
    remarks = [f"{each.origin.device}: {each.remark}" for each in parts if each.remark is not None]
    return ActEnergy(
        origin=origin,
        joules=None if missing else math.fsum(each.joules for each in parts if each.joules is not None),
        bound_j=sum_of_known([each.bound_j for each in parts]),
        act_s=mean_of_known([each.act_s for each in parts]),
        count=mean_of_known([each.count for each in parts]),
        window_s=mean_of_known([each.window_s for each in parts]),
        alignment="acts" if any(each.alignment == "acts" for each in parts) else "ticks",
        reason="; ".join(missing) or None,
        remark="; ".join(remarks) or None,
        window_error=max((each.window_error for each in parts if each.window_error is not None), default=None),
    )


def summed_idle(parts: Sequence[IdlePower]) -> IdlePower:
    """The same for idle power."""
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
    """None where any is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """None where any is, or where there are none."""
    total = sum_of_known(values)
    return total / len(values) if total is not None and values else None


def energy_figure(
    windows: Sequence[ActEnergy], idle_before: IdlePower | None = None, idle_after: IdlePower | None = None
) -> EnergyFigure:
    """Windows of one act on one device with one source, at least one, as a figure.

    The idle power is the mean of before and after, of the one that there is where the other is missing. Its uncertainty
    is half of their difference (the drift) and the larger of their bounds, in squares.
    """
    found = [each for each in windows if each.joules is not None]
    joules = [each.joules for each in found if each.joules is not None]
    act_s = mean_of_known([each.act_s for each in found])
    bound_j = _largest_of_known([each.bound_j for each in found])
    idle_w, idle_uncertainty_w = mean_idle([idle_before, idle_after])
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
        reason=_said_of(windows, [each.reason for each in windows if each.joules is None], " gave no figure"),
        remark=_said_of(windows, [each.remark for each in found if each.remark is not None]),
        window_error=max((each.window_error for each in found if each.window_error is not None), default=None),
    )


def _uncertainty(joules: Sequence[float], bound_j: float | None, baseline_j: float | None) -> float | None:
    """None where a part of it is not known."""
    return None if bound_j is None or baseline_j is None else combined_uncertainty(joules, bound_j, baseline_j)


def _said_of(windows: Sequence[ActEnergy], said: Sequence[str | None], what: str = "") -> str | None:
    """How many of the windows something is said of, and the first that is said."""
    return f"{len(said)} of {len(windows)} windows{what}: {said[0]}" if said else None


def _largest_of_known(values: Sequence[float | None]) -> float | None:
    """None where any is, or where there are none."""
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
