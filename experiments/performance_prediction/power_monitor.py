"""In: the device that computes; out: its power trace between start and stop, and the energy of one inference."""

import math
from collections.abc import Callable, Sequence

import torch

from experiment_core_utils.meters.energy_statistics import sum_of_known
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.power import PowerSampler, energy_of_trace
from experiment_core_utils.meters.windows import WindowGoal, energy_of_act, why_no_power
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import gpu_uuid
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.energy import ActEnergy
from experiments.performance_prediction.profile_records import InferenceEnergy, PowerWindow

NOT_ASKED = "energy was not requested (--energy off)"


def instruments_of(device: torch.device) -> Instruments:
    """What reads the energy of this device: that GPU's counter and power, or the CPU's counters; not calibrated."""
    found = find_instruments(uuids_of([device]), HostClock())
    uuid = gpu_uuid(device)
    return found if uuid is None else found.of_device(uuid)


class PowerMonitor:
    """Power of a device over time, by the project's meters.

    Args:
        using: what reads it, calibrated; None where nothing is to be read.
        goal: how long a window of `energy_of` is to be; None for the usual one.
    """

    def __init__(self, using: Instruments | None, goal: WindowGoal | None = None) -> None:
        self._using = using
        self._goal = goal
        self._sampler: PowerSampler | None = None
        self._begun_s = math.nan

    def start(self) -> None:
        """Begin a trace; without a power reading the stop says so. Raises ConfigurationError where one is begun."""
        if self._sampler is not None:
            raise ConfigurationError("this power monitor has started already; stop it before starting it again")
        if self._using is None or not self._using.probes:
            return
        self._sampler = self._using.power_sampler()
        self._sampler.start()
        self._begun_s = self._using.clock.now_s()

    def stop(self) -> PowerWindow:
        """End it. The caller has synchronised the device."""
        if self._using is None:
            return PowerWindow(None, (), None, None, None, NOT_ASKED)
        if self._sampler is None:
            why = why_no_power(self._using) or "the power monitor was not started"
            return PowerWindow(None, (), None, None, None, why)
        ended_s = self._using.clock.now_s()
        sampler, self._sampler = self._sampler, None
        traces = sampler.stop()
        parts = [energy_of_trace(trace, self._begun_s, ended_s, has_steps_at_ends=True) for trace in traces]
        seconds = ended_s - self._begun_s
        missing = [f"{part.origin.device}: {part.reason}" for part in parts if part.joules is None]
        if missing or seconds <= 0:
            return PowerWindow(seconds, traces, None, None, None, "; ".join(missing) or "the window has no length")
        joules = math.fsum(part.joules for part in parts if part.joules is not None)
        bound_j = math.fsum(part.bound_j for part in parts if part.bound_j is not None)
        return PowerWindow(seconds, traces, joules, bound_j, joules / seconds, None)

    def energy_of(self, inference: Callable[[], object]) -> InferenceEnergy:
        """Energy of one inference, which is repeated in a window that is long enough for the meter's tick.

        The device's own counter is preferred to integrated power readings.

        Args:
            inference: returns when the device has done all of it; warmed up.
        """
        if self._using is None:
            return _no_energy(NOT_ASKED)
        try:
            return figure_of(energy_of_act(inference, self._using, self._goal))
        except MeterUnavailable as error:
            return _no_energy(str(error))


def figure_of(acts: Sequence[ActEnergy]) -> InferenceEnergy:
    """One figure of what all sources say: of GPUs where there are any, by counters where they tell something."""
    component = "gpu" if any(act.origin.component == "gpu" for act in acts) else "cpu"
    of_component = [act for act in acts if act.origin.component == component]
    chosen = _best_basis(of_component)
    if not chosen:
        reasons = [f"{act.origin.device}: {act.reason}" for act in of_component]
        return _no_energy("; ".join(reasons) or "no meter reports the energy of the device that computes")
    powers = [act.joules / act.act_s for act in chosen if act.joules is not None and act.act_s]
    return InferenceEnergy(
        joules=sum_of_known([act.joules for act in chosen]),
        bound_j=sum_of_known([act.bound_j for act in chosen]),
        power_w=math.fsum(powers),
        window_s=chosen[0].window_s,
        source=chosen[0].origin.source,
        basis=chosen[0].origin.basis,
        reason=None,
        remark="; ".join(dict.fromkeys(act.remark for act in chosen if act.remark is not None)) or None,
    )


def _best_basis(acts: Sequence[ActEnergy]) -> list[ActEnergy]:
    """Figures by counters if there are any, else those by power readings."""
    telling = [act for act in acts if act.joules is not None]
    return [act for act in telling if act.origin.basis == "counter"] or telling


def _no_energy(reason: str) -> InferenceEnergy:
    return InferenceEnergy(None, None, None, None, None, None, reason)
