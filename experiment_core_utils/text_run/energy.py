"""One process's part in measuring the energy of a text experiment."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from experiment_core_utils.config.text import TextConfig
from experiment_core_utils.d_energy_tracking import require_tracking
from experiment_core_utils.meters.instruments import Instruments, uuids_of
from experiment_core_utils.meters.power import NOT_REQUESTED
from experiment_core_utils.meters.requested_energy import ONLY_ESTIMATES, found_instruments
from experiment_core_utils.meters.tracked_window import EnergySources, EnergyTracker
from experiment_core_utils.meters.windows import why_no_power
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.collectives import all_or_raise, local_gather
from experiment_core_utils.primitives.device import visible_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.energy import PowerBeside

T = TypeVar("T")


class TextEnergy:
    """One process's part in measuring an experiment's energy.

    The first process of a machine tracks it, with the GPUs that any of its processes sees; each reads the power of the
    GPUs that it computes on itself.

    Raises:
        ConfigurationError: energy is required and codecarbon does not know the country; in all processes.
        EnergyRefused: energy is required and nothing on this machine measures it; in all processes.
    """

    def __init__(self, config: TextConfig, accelerator: Accelerator, sources: EnergySources) -> None:
        self._config = config
        self._accelerator = accelerator
        self._sources = sources
        own_gpus = uuids_of(visible_gpus()) if sources.gpus is None else sources.gpus
        # A process may see none but its own GPU (`srun --gpus-per-task=1`).
        self._gpus = tuple(dict.fromkeys(itertools.chain(*local_gather(own_gpus, accelerator))))
        self.reason = NOT_REQUESTED if config.energy_mode == "off" else None
        if config.energy_mode == "required":
            at = self._gpus, config.country_iso_code, sources
            tracks = accelerator.is_local_main_process
            all_or_raise(lambda: require_tracking(*at) if tracks else None, accelerator)

    @cached_property
    def _power(self) -> Instruments | None:
        """What reads the power of the devices that this process computes on; None where energy is not requested."""
        if self._config.energy_mode == "off":
            return None
        at, is_spread = self._accelerator.local_process_index, self._config.device_map == "auto"
        return found_instruments(self._config.device, at, self._sources.instruments, is_spread=is_spread)

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
        tracker = self._agreed(lambda: self._opened(experiment_id, folder))
        power = self._power
        try:
            with nullcontext(()) if power is None else power.power_beside() as traces:
                result, windows = run()
        except BaseException:
            if tracker is not None:
                tracker.stop(is_at_rest=False)
            raise
        self._agreed(lambda: self._stop(tracker))
        return result, PowerBeside(traces, windows, NOT_REQUESTED if power is None else why_no_power(power))

    def _opened(self, experiment_id: str, folder: Path) -> EnergyTracker | None:
        if self.reason is not None or not self._accelerator.is_local_main_process:
            return None
        return EnergyTracker(experiment_id, folder, self._config.country_iso_code, self._gpus, self._sources)

    def _stop(self, tracker: EnergyTracker | None) -> None:
        if tracker is not None:
            tracker.stop()
            if self._config.energy_mode == "required" and not tracker.is_measured:
                raise MeterUnavailable(f"no meter of the machine gave a reading, and {ONLY_ESTIMATES}")

    def _agreed(self, act: Callable[[], T | None]) -> T | None:
        """What `act` returns; None where energy is optional and a meter is lost, for the reason that is kept."""

        def unless_lost() -> T | None:
            try:
                return act()
            except MeterUnavailable as error:
                if self._config.energy_mode == "required":
                    raise
                self.reason = str(error)
                return None

        return all_or_raise(unless_lost, self._accelerator)
