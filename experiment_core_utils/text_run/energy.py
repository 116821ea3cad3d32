"""One process's part in measuring the energy of a text experiment."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.d_energy_tracking import start_energy_tracking, stop_energy_tracking
from experiment_core_utils.meters.codecarbon import CodecarbonLibrary, CodecarbonMeter
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.meters.power import NOT_REQUESTED
from experiment_core_utils.meters.requested_energy import log_estimate, refused_energy, unavailable_reason
from experiment_core_utils.meters.tracked_window import EnergyTracker
from experiment_core_utils.meters.windows import why_no_power
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.collectives import all_or_raise, local_gather
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import PowerBeside

# Before and after the generation of a text run, where the machine has instruments of its own.
IDLE_S = 5.0
_ONLY_ESTIMATES = "codecarbon only estimates here, from load and nominal power"
T = TypeVar("T")


@dataclass(frozen=True)
class EnergySources:
    """What energy is read with; None is found on the machine."""

    library: CodecarbonLibrary | None = None
    instruments: Instruments | None = None  #: calibrated
    idle_s: float = IDLE_S
    gpus: tuple[str, ...] | None = None  #: that this process sees, by the driver's ids


class TextEnergy:
    """One process's part in measuring an experiment's energy.

    The first process of a machine tracks it, with the GPUs that any of its processes sees; each reads the power of the
    GPUs that it computes on itself.

    Raises:
        ConfigurationError: codecarbon does not know the country; in all processes.
        EnergyRefused: energy is required and nothing on this machine measures it; in all processes.
    """

    def __init__(self, config: TextConfig, accelerator: Accelerator, sources: EnergySources) -> None:
        self._config = config
        self._accelerator = accelerator
        self._sources = sources
        own = uuids_of(visible_gpus()) if sources.gpus is None else sources.gpus
        # A process may see none but its own GPU (`srun --gpus-per-task=1`).
        self._gpus = tuple(dict.fromkeys(itertools.chain(*local_gather(own, accelerator))))
        self.reason = all_or_raise(self._why_not, accelerator)

    def _why_not(self) -> str | None:
        """Why there will be no figure; sources are looked for before anything is loaded.

        codecarbon is started once to find out; where energy is required, its estimates do not count. Where it or the
        machine's instruments measure, the other one's absence costs its own figures alone.
        """
        requested = self._config.energy_mode
        if requested == "off":
            return NOT_REQUESTED
        if not self._accelerator.is_local_main_process:
            return None
        country, library = self._config.country_iso_code, self._sources.library
        instruments = self._sources.instruments or find_instruments(self._gpus, HostClock())

        unmeasured = unavailable_reason(instruments.require_any)

        def start_codecarbon() -> None:
            meter = CodecarbonMeter(country, [], 0, library)
            meter.release()
            if meter.cpu_source == "rapl" or unmeasured is None:
                return
            if requested == "required":
                raise MeterUnavailable(_ONLY_ESTIMATES)
            log_estimate(unmeasured)

        problems = [unavailable_reason(start_codecarbon), unmeasured]
        if None in problems:
            return None
        reason = "; ".join(filter(None, problems))
        if requested == "required":
            raise refused_energy(reason, "energy: ")
        return reason

    @cached_property
    def _power(self) -> Instruments | None:
        """What reads the power of the devices that this process computes on; None where energy is not requested."""
        if self._config.energy_mode == "off":
            return None
        if self._sources.instruments is not None:
            return self._sources.instruments
        own = visible_gpus() if self._config.device_map == "auto" else [self._accelerator.device]
        return find_instruments(uuids_of(own), HostClock())

    @property
    def clock(self) -> Clock:
        """The clock by which power is read: what runs beside it keeps its times by the same one."""
        return HostClock() if self._power is None else self._power.clock

    def measured(
        self, run: Callable[[], tuple[T, Sequence[tuple[float, float]]]], experiment_id: str, folder: Path
    ) -> tuple[T, PowerBeside]:
        """What `run` returns, with the window around it; all processes wait until it is open, and until it is closed.

        Idle power is measured outside, while nothing runs.

        Args:
            run: returns its result, and the windows of its parts by `clock`.
        """
        tracker = all_or_raise(lambda: self._start(experiment_id, folder), self._accelerator)
        power = self._power
        try:
            with nullcontext(()) if power is None else power.power_beside() as traces:
                result, windows = run()
        except BaseException:
            if tracker is not None:
                stop_energy_tracking(tracker, is_at_rest=False)
            raise
        all_or_raise(lambda: self._stop(tracker), self._accelerator)
        return result, PowerBeside(traces, windows, NOT_REQUESTED if power is None else why_no_power(power))

    def _start(self, experiment_id: str, folder: Path) -> EnergyTracker | None:
        if self.reason is not None or not self._accelerator.is_local_main_process:
            return None
        try:
            return start_energy_tracking(
                experiment_id,
                folder,
                self._config.country_iso_code,
                gpu_uuids=self._gpus,
                library=self._sources.library,
                instruments=self._sources.instruments,
                idle_s=self._sources.idle_s,
            )
        except MeterUnavailable as error:
            self._disable(error)
            return None

    def _stop(self, tracker: EnergyTracker | None) -> None:
        if tracker is not None:
            try:
                stop_energy_tracking(tracker)
                if self._config.energy_mode == "required" and not tracker.is_measured:
                    raise MeterUnavailable(f"no meter of the machine gave a reading, and {_ONLY_ESTIMATES}")
            except MeterUnavailable as error:
                self._disable(error)

    def _disable(self, error: MeterUnavailable) -> None:
        """Remember why there is no figure; raises the error where energy is required."""
        if self._config.energy_mode == "required":
            raise error
        self.reason = str(error)
