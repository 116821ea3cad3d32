"""In: what a text experiment asks of energy; out: its window around the generation, or why there is none."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from experiment_core_utils.a_distributed import of_local_processes, outcome_of_all
from experiment_core_utils.apportioned_energy import NOT_ASKED
from experiment_core_utils.d_energy_tracking import EnergyTracker, start_energy_tracking, stop_energy_tracking
from experiment_core_utils.i_metrics_energy import aggregate_energy_metrics, not_tracked
from experiment_core_utils.meters.codecarbon_meter import CodecarbonLibrary, CodecarbonMeter
from experiment_core_utils.meters.instruments import Instruments, find_instruments, uuids_of
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.records import EnergyMetrics
from experiment_core_utils.primitives.text_config import TextConfig

# Before and after the generation, where the machine has instruments of its own.
IDLE_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True)
class EnergySources:
    """What energy is read with; None is found on the machine.

    Attributes:
        instruments: calibrated.
        gpus: that this process sees, by the driver's ids.
    """

    library: CodecarbonLibrary | None = None
    instruments: Instruments | None = None
    idle_s: float = IDLE_S
    gpus: tuple[str, ...] | None = None


class TextEnergy:
    """One process's part in measuring an experiment's energy.

    The first process of a machine tracks it, with the GPUs that any of its processes sees; each reads the power of the
    GPUs that it computes on itself.

    Raises:
        ConfigurationError: codecarbon does not know the country; in all processes.
        MeterUnavailable: energy is required and nothing here tells it; in all processes.
    """

    def __init__(self, config: TextConfig, accelerator: Accelerator, sources: EnergySources) -> None:
        self._config = config
        self._accelerator = accelerator
        self._sources = sources
        own = uuids_of(visible_gpus()) if sources.gpus is None else sources.gpus
        # A process may see none but its own GPU (`srun --gpus-per-task=1`).
        self._gpus = tuple(dict.fromkeys(itertools.chain(*of_local_processes(own, accelerator))))
        self.reason = outcome_of_all(self._why_not, accelerator)

    def _why_not(self) -> str | None:
        """Why there will be no figure; sources are looked for before anything is loaded.

        codecarbon is started once to find out. Where it or the machine's instruments measure, the other one's absence
        costs its own figures alone.
        """
        wanted = self._config.energy_wanted
        if wanted == "off":
            return NOT_ASKED
        if not self._accelerator.is_local_main_process:
            return None
        problems = [self._without_codecarbon(), self._without_instruments()]
        if None in problems:
            return None
        reason = "; ".join(filter(None, problems))
        if wanted == "required":
            raise MeterUnavailable(
                f"energy cannot be measured here: {reason}; set energy: optional to go on without it, or energy: off"
            )
        return reason

    def _without_codecarbon(self) -> str | None:
        """Why it does not measure; None where it does."""
        try:
            CodecarbonMeter(self._config.country_iso_code, [], 0, self._sources.library).release()
        except MeterUnavailable as error:
            return str(error)
        return None

    def _without_instruments(self) -> str | None:
        """Why the machine's own do not measure; None where they do."""
        instruments = self._sources.instruments or find_instruments(self._gpus, HostClock())
        try:
            instruments.require_any()
        except MeterUnavailable as error:
            return str(error)
        return None

    def power(self) -> Instruments | None:
        """What reads the power of the devices that this process computes on; None where energy is not asked for."""
        if self._config.energy_wanted == "off":
            return None
        if self._sources.instruments is not None:
            return self._sources.instruments
        own = visible_gpus() if self._config.device_map == "auto" else [self._accelerator.device]
        return find_instruments(uuids_of(own), HostClock())

    def measured(self, run: Callable[[], T], experiment_id: str, folder: Path) -> T:
        """What `run` returns, with the window around it; all processes wait until it is open, and until it is closed.

        Idle power is measured outside, while nothing runs.
        """
        tracker = outcome_of_all(lambda: self._start(experiment_id, folder), self._accelerator)
        try:
            result = run()
        except BaseException:
            if tracker is not None:
                stop_energy_tracking(tracker, is_at_rest=False)
            raise
        outcome_of_all(lambda: self._stop(tracker), self._accelerator)
        return result

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
            self._do_without(error)
            return None

    def _stop(self, tracker: EnergyTracker | None) -> None:
        if tracker is not None:
            try:
                stop_energy_tracking(tracker)
            except MeterUnavailable as error:
                self._do_without(error)

    def _do_without(self, error: MeterUnavailable) -> None:
        """Remember why there is no figure; raises the error where energy is required."""
        if self._config.energy_wanted == "required":
            raise error
        self.reason = str(error)

    def metrics(self, experiment_id: str, folder: Path) -> EnergyMetrics:
        """This process's energy, as it is saved."""
        if self.reason is not None:
            return not_tracked(f"energy was not tracked: {self.reason}")
        return aggregate_energy_metrics(experiment_id, self._accelerator, folder)
