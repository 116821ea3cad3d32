"""Energy by codecarbon: one window over CPU, memory and GPUs, as a row of its own columns.

`LoadEstimate` is the same as an `EnergyMeter` for machines on which nothing measures.

The one file that imports codecarbon. Only its offline tracker is used: it opens no connection. Its configuration files
and environment variables are passed over, because some of them would. Energies of a window are taken from the task that
spans it; codecarbon's powers of a task are means over all tasks so far and are computed anew here.
"""

import logging
import math
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from experiment_core_utils.primitives.clock import Clock
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, MeterUnavailable, first_line
from experiment_core_utils.primitives.units import joules_of_kwh
from experiment_core_utils.records.energy import ALL_DEVICES, DeviceEnergy, EnergyOrigin, EnergyReading
from experiment_core_utils.records.text import EnergyFigures, EnergyMetrics, EnergySource, InstrumentEnergy

LOGGER = logging.getLogger(__name__)
WORLD_MEAN = "world mean (no country given)"
# What codecarbon lets through; its constructor swallows errors, and the object then lacks attributes.
_FAILURES = (*LIBRARY_ERRORS, subprocess.SubprocessError)
_POWERS = {"cpu_power": "cpu_energy", "gpu_power": "gpu_energy", "ram_power": "ram_energy"}
# Sampled once a second by codecarbon; 0 where the window was shorter.
_SAMPLED = ("cpu_utilization_percent", "gpu_utilization_percent", "ram_utilization_percent", "ram_used_gb")


@dataclass(frozen=True)
class CodecarbonLibrary:
    """What is used of codecarbon."""

    new_tracker: Callable[..., Any]  #: its `OfflineEmissionsTracker`
    countries: Callable[[], Collection[str]]  #: three-letter codes of the countries whose electricity mix it knows
    #: whether it can read the CPU's own energy counters here; else it estimates from the load
    reads_rapl: Callable[[], bool]


class CodecarbonMeter:
    """One machine's energy between `open` and `close`, any number of times one after the other.

    The hardware is probed here (more than a second the first time in a process), not in a window. A codecarbon that is
    not installed, does not start or fails on the way raises nothing: `reason` says so.

    Args:
        country_iso_code: three letters, whose electricity mix gives the emissions; None takes the world mean.
        gpu_indices: the GPUs to count, by NVML's numbers (codecarbon does not find them by the driver's ids, though it
            says so); none given leaves the choice to codecarbon, which takes all it finds.
        gpus_in_use: how many GPUs do the work, to be recorded beside.
        library: codecarbon, or a stand-in; None imports it.

    Attributes:
        reason: why there is no figure at all, or none of the last window; None where there is one.
        reads_counters: whether the CPU's energy is measured (RAPL); False where it is estimated from its load.

    Raises:
        ConfigurationError: codecarbon does not know the country.
    """

    def __init__(
        self,
        country_iso_code: str | None,
        gpu_indices: Sequence[int],
        gpus_in_use: int,
        library: CodecarbonLibrary | None = None,
    ) -> None:
        self.reason: str | None = None
        self.reads_counters = False
        self._gpus_in_use = gpus_in_use
        self._emissions_basis = WORLD_MEAN if country_iso_code is None else f"electricity mix of {country_iso_code}"
        self._tracker: Any = None
        self._is_open = False
        self._num_windows = 0
        with self._failure_kept():
            self._start(library if library is not None else codecarbon_library(), country_iso_code, gpu_indices)
        # The first task reads data files and primes the counters.
        self.open()
        self.close()
        self._tracker = self._tracker if self.reason is None else None

    def _start(self, library: CodecarbonLibrary, country_iso_code: str | None, gpu_indices: Sequence[int]) -> None:
        if country_iso_code is not None and country_iso_code not in library.countries():
            raise ConfigurationError(
                f"codecarbon knows no electricity mix of country {country_iso_code!r}; give a three-letter code such "
                "as FRA, or none for the world mean"
            )
        # Its import sets another level.
        logging.getLogger("codecarbon").setLevel(logging.ERROR)
        self.reads_counters = library.reads_rapl()
        tracker = _offline_tracker(library, country_iso_code, gpu_indices)
        tracker.get_detected_hardware()
        self._tracker = tracker

    def open(self) -> None:
        """Begin a window; raises ConfigurationError where one is open."""
        if self._is_open:
            raise ConfigurationError("this energy meter has an open window; close it before opening another")
        self._num_windows += 1
        self._is_open = True
        if self._tracker is not None:
            self.reason = None
            with self._failure_kept():
                self._tracker.start_task(f"window {self._num_windows}")

    def close(self) -> dict[str, Cell] | None:
        """End the window: codecarbon's columns (kWh, kg, s, W), then where the figures come from; None for `reason`.

        Columns beyond codecarbon's:
            cpu_energy_source: `rapl` (measured) or `codecarbon_estimate` (from load and nominal power).
            emissions_basis: whose electricity mix.
            gpus_in_use: how many GPUs did the work; `gpu_count` says how many codecarbon sees.

        Raises:
            ConfigurationError: no window is open.
        """
        if not self._is_open:
            raise ConfigurationError("this energy meter has no open window; open one before closing")
        self._is_open = False
        measured = None
        if self._tracker is not None:
            with self._failure_kept():
                measured = self._tracker.stop_task(f"window {self._num_windows}")
        if measured is None:
            self.reason = self.reason or "codecarbon measured nothing: it did not begin the window, see its error above"
        if measured is None or self.reason is not None:
            return None
        return {
            **_repaired(dict(measured.values)),
            "cpu_energy_source": "rapl" if self.reads_counters else "codecarbon_estimate",
            "emissions_basis": self._emissions_basis,
            "gpus_in_use": self._gpus_in_use,
        }

    def release(self) -> None:
        """End codecarbon's threads; what was measured stays valid, whether it lets them be ended or not."""
        try:
            if self._tracker is not None:
                self._tracker.stop()
        except _FAILURES as error:
            LOGGER.warning("codecarbon does not end its threads: %s", first_line(error))

    @contextmanager
    def _failure_kept(self) -> Iterator[None]:
        """A context whose first failure of codecarbon becomes the reason."""
        try:
            yield
        except MeterUnavailable as error:
            self.reason = self.reason or str(error)
        except _FAILURES as error:
            self.reason = self.reason or f"codecarbon does not track here: {first_line(error)}"


class LoadEstimate:
    """An `EnergyEstimate` of the whole machine's CPUs, from their load and nominal power, and of its memory.

    codecarbon computes with the mean load of a window, which it reads about once a second and at the window's end. GPUs
    are not in it. Its error is not known, so no figure has a bound.

    Args:
        library: codecarbon, or a stand-in; None imports it.

    Raises:
        MeterUnavailable: codecarbon is not installed or does not start, or would measure instead of estimating.
    """

    origins = (
        EnergyOrigin(ALL_DEVICES, "cpu", "codecarbon_estimate", "estimated", "load_model"),
        EnergyOrigin(ALL_DEVICES, "ram", "codecarbon_estimate", "estimated", "load_model"),
    )

    def __init__(self, clock: Clock, library: CodecarbonLibrary | None = None) -> None:
        self._clock = clock
        self._meter = CodecarbonMeter(None, [], 0, library)
        self._started_s: float | None = None
        if self._meter.reason is not None:
            raise MeterUnavailable(self._meter.reason)
        if self._meter.reads_counters:
            self._meter.release()
            raise MeterUnavailable("codecarbon would read the CPU's counters (RAPL) here: no estimate from load")

    def open(self) -> None:
        self._meter.open()
        self._started_s = self._clock.now_s()

    def close(self) -> EnergyReading:
        ended_s, row = self._clock.now_s(), self._meter.close()
        assert self._started_s is not None
        seconds, self._started_s = ended_s - self._started_s, None
        return EnergyReading(seconds, tuple(self._figure(origin, row) for origin in self.origins))

    def release(self) -> None:
        """Codecarbon has threads in a window only."""
        if self._started_s is not None:
            self.close()

    def _figure(self, origin: EnergyOrigin, row: Mapping[str, Cell] | None) -> DeviceEnergy:
        kwh = 0.0 if row is None else number_in(row, f"{origin.component}_energy")
        if kwh > 0:
            return DeviceEnergy(origin, joules_of_kwh(kwh), None, None)
        return DeviceEnergy(origin, None, None, self._meter.reason or READ_NOTHING)


def codecarbon_library() -> CodecarbonLibrary:
    """The installed package; raises MeterUnavailable where there is none."""
    try:
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.core.cpu import is_rapl_available
        from codecarbon.input import DataSource
    except ImportError as error:
        raise MeterUnavailable("codecarbon is not installed (pip install codecarbon)") from error
    return CodecarbonLibrary(
        new_tracker=OfflineEmissionsTracker,
        countries=lambda: DataSource().get_global_energy_mix_data().keys(),
        reads_rapl=is_rapl_available,
    )


def _offline_tracker(library: CodecarbonLibrary, country_iso_code: str | None, gpu_indices: Sequence[int]) -> Any:
    """Every setting that a configuration file or the environment could change is given."""
    return library.new_tracker(
        country_iso_code=country_iso_code,
        country_2letter_iso_code=None,
        region=None,
        cloud_provider=None,
        cloud_region=None,
        gpu_ids=list(gpu_indices) or None,
        tracking_mode="machine",
        project_name="codecarbon",
        output_methods=[],
        output_handlers=[],
        output_dir=".",
        emissions_endpoint=None,
        # Not None: codecarbon would look for a token under an older name, and use it.
        electricitymaps_api_token="",
        force_carbon_intensity_g_co2e_kwh=None,
        force_cpu_power=None,
        force_ram_power=None,
        force_mode_cpu_load=False,
        pue=1.0,
        wue=0.0,
        rapl_include_dram=False,
        rapl_prefer_psys=False,
        measure_power_secs=15.0,
        api_call_interval=-1,
        metadata=None,
        log_level="error",
        logger_preamble="",
        allow_multiple_runs=True,
    )


def _repaired(row: dict[str, Any]) -> dict[str, Cell]:
    """Powers of this window alone; utilisation that was never sampled is absent."""
    seconds = row["duration"]
    for power, energy in _POWERS.items():
        row[power] = joules_of_kwh(row[energy]) / seconds if seconds > 0 else None
    if not row["ram_used_gb"]:
        row |= dict.fromkeys(_SAMPLED)
    return row


READ_NOTHING = "codecarbon read nothing"


def measures(window: Mapping[str, Cell]) -> bool:
    """Whether any energy of a window that `CodecarbonMeter.close` gave was measured; memory is always estimated."""
    return window["cpu_energy_source"] == "rapl" or number_in(window, "gpu_energy") > 0


def gpu_missing_reason(window: Mapping[str, Cell]) -> tuple[str | None, bool]:
    """Why a window has no GPU energy, if it has none, and whether its total is whole all the same.

    codecarbon counts every GPU of the machine in `gpu_count`, also where it tracks none of them.
    """
    listed = number_in(window, "gpu_count")
    in_use = number_in(window, "gpus_in_use") if window.get("gpus_in_use") is not None else listed
    if number_in(window, "gpu_energy") > 0 and listed >= in_use:
        return None, True
    if in_use == 0:
        return "codecarbon tracks no GPU here, and none is in use", True
    if listed == 0:
        return f"codecarbon tracks no GPU here, {in_use:g} in use; it needs nvidia-smi on the PATH", False
    if listed < in_use:
        return f"codecarbon tracks {listed:g} of the {in_use:g} GPUs in use", False
    return f"codecarbon read no energy from the {in_use:g} GPUs in use (a window under 0.2 s is too short)", False


def number_in(window: Mapping[str, Cell], column: str) -> float:
    """A figure that `read_windows` has found to be a number."""
    value = window[column]
    assert isinstance(value, int | float)
    return value


# Published figures, by codecarbon's columns.
_COLUMNS = {
    "total_energy_kwh": "energy_consumed",
    "cpu_energy_kwh": "cpu_energy",
    "gpu_energy_kwh": "gpu_energy",
    "ram_energy_kwh": "ram_energy",
    "total_emissions_kg_co2": "emissions",
    "duration_seconds": "duration",
}
ESTIMATE: EnergySource = {"source": "codecarbon_estimate", "kind": "estimated"}


def sum_windows(windows: Sequence[Mapping[str, Cell]], beside: InstrumentEnergy) -> EnergyMetrics:
    """The figures of windows that `read_windows` gave, at least one, and those beside them.

    A part that codecarbon gives as 0 was not read: None. Where GPUs are in use that it does not count, the total and
    the emissions are None, too.
    """
    sums = {name: math.fsum(number_in(window, column) for window in windows) for name, column in _COLUMNS.items()}
    figures = {name: figure or None for name, figure in sums.items()}
    reasons = {name: READ_NOTHING for name, figure in figures.items() if figure is None}
    found = [gpu_missing_reason(window) for window in windows]
    reason = next((each for each, _ in found if each is not None), None)
    if reason is not None:
        reasons["gpu_energy_kwh"] = reason
    if not all(is_complete for _, is_complete in found):
        reasons |= dict.fromkeys(("total_energy_kwh", "total_emissions_kg_co2"), "GPUs in use are not in it")
    known = {name: None if name in reasons else figure for name, figure in figures.items()}
    last = windows[-1]
    return EnergyMetrics(
        **cast(EnergyFigures, known),
        **beside,
        sources=_sources(windows, known),
        num_periods=len(windows),
        tracking_mode=_text(last["tracking_mode"]),
        cpu_model=_text(last["cpu_model"]),
        gpu_model=_text(last["gpu_model"]),
        emissions_basis=_basis(windows),
        reason="; ".join(f"{name}: {why}" for name, why in reasons.items()) or None,
    )


def _sources(windows: Sequence[Mapping[str, Cell]], known: Mapping[str, float | None]) -> dict[str, EnergySource]:
    sources: dict[str, EnergySource] = {
        "cpu_energy_kwh": _cpu_source({window.get("cpu_energy_source") for window in windows}),
        "gpu_energy_kwh": {"source": "nvml_counter", "kind": "measured"},
        "ram_energy_kwh": ESTIMATE,
    }
    parts = {name: source for name, source in sources.items() if known[name] is not None}
    names = [source["source"] for source in parts.values()]
    known_values = [name for name in dict.fromkeys(names) if name is not None]
    total = EnergySource(source=" + ".join(known_values) if None not in names else None, kind="estimated")
    sums = {name: total for name in ("total_energy_kwh", "total_emissions_kg_co2") if known[name] is not None}
    return parts | sums


def _cpu_source(names: set[Cell]) -> EnergySource:
    """Source of the CPU energy of all windows; a file that codecarbon wrote itself does not say."""
    if names == {"rapl"}:
        return {"source": "rapl", "kind": "measured"}
    return ESTIMATE if None not in names else {"source": None, "kind": None}


def _basis(windows: Sequence[Mapping[str, Cell]]) -> str | None:
    """As the file says; from the country where codecarbon wrote it itself."""
    known_values = []
    for window in windows:
        code = window["country_iso_code"]
        of_country = WORLD_MEAN if code is None else f"electricity mix of {code}"
        known_values.append(str(window.get("emissions_basis") or of_country))
    return ", ".join(dict.fromkeys(known_values))


def _text(cell: Cell) -> str | None:
    return None if cell in (None, "") else str(cell)
