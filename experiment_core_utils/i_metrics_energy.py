"""In: an experiment's `emissions_{id}.csv` and `energy_{id}.json`; out: its energy, each figure with its source."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from experiment_core_utils.meters.codecarbon_energy import READ_NOTHING, gpu_problem, number_in
from experiment_core_utils.meters.codecarbon_meter import WORLD_MEAN
from experiment_core_utils.meters.emissions_file import emissions_path, read_windows
from experiment_core_utils.meters.energy_file import energy_path, read_energy_windows
from experiment_core_utils.meters.energy_statistics import sum_of_known
from experiment_core_utils.primitives.csv_cells import Cell
from experiment_core_utils.primitives.records import (
    EnergyFigures,
    EnergyMetrics,
    EnergySource,
    InstrumentEnergy,
    ProcessPlace,
)
from experiment_core_utils.window_energy import instrument_energy

# Published figures, by codecarbon's columns.
_COLUMNS = {
    "total_energy_kwh": "energy_consumed",
    "cpu_energy_kwh": "cpu_energy",
    "gpu_energy_kwh": "gpu_energy",
    "ram_energy_kwh": "ram_energy",
    "total_emissions_kg_co2": "emissions",
    "duration_seconds": "duration",
}
_ESTIMATE: EnergySource = {"source": "codecarbon_estimate", "kind": "estimated"}


def aggregate_energy_metrics(
    experiment_id: str, accelerator: ProcessPlace, output_dir: Path = Path(".")
) -> EnergyMetrics:
    """The energy of this process's machine: all windows of `emissions_{experiment_id}.csv` in `output_dir` summed.

    The published figures are codecarbon's, None where it measured not every window. Beside them stand those of the
    machine's own counters and power readings, from `energy_{experiment_id}.json`.

    The first process of a machine speaks for it; the others, and one that did not track, get None throughout with the
    reason, so that sums over processes count a machine once. CPU figures are of the whole machine, whoever used it.
    Not counted: disks, network, fans, cooling, losses of the power supply.

    Raises:
        ConfigurationError: an id that is no part of a file name.
        ResultsError: the file is torn or not codecarbon's, or the one beside it is not what its name says.
    """
    path = emissions_path(experiment_id, output_dir)
    if accelerator.local_process_index != 0:
        return not_tracked(
            f"process {accelerator.process_index} shares its machine: the first process there tracks for all"
        )
    beside = energy_path(experiment_id, output_dir)
    if not path.exists() and not beside.exists():
        return not_tracked(f"energy was not tracked: there is no {path}")
    windows = read_energy_windows(beside) if beside.exists() else ()
    instruments = instrument_energy(windows, None if beside.exists() else f"there is no {beside}")
    failed = [window.codecarbon_reason for window in windows if window.codecarbon_reason is not None]
    if not path.exists() and not failed:
        failed = [f"there is no {path}"]
    if failed:
        # Rows of some windows would pass for those of all.
        reason = f"codecarbon lacks {len(failed)} of {len(windows)} windows: {failed[0]}"
        seconds = sum_of_known([None if each.reading is None else each.reading.seconds for each in windows])
        return _without_codecarbon(reason, instruments, seconds, len(windows))
    return sum_windows(read_windows(path), instruments)


def energy_metrics(
    experiment_id: str, accelerator: ProcessPlace, output_dir: Path, reason: str | None
) -> EnergyMetrics:
    """This process's energy as it is saved: `aggregate_energy_metrics`, or no figure where `reason` says why."""
    if reason is not None:
        return not_tracked(f"energy was not tracked: {reason}")
    return aggregate_energy_metrics(experiment_id, accelerator, output_dir)


def not_tracked(reason: str) -> EnergyMetrics:
    """No figure at all."""
    return _without_codecarbon(reason, instrument_energy((), reason), None, 0)


def _without_codecarbon(
    reason: str, beside: InstrumentEnergy, duration_seconds: float | None, num_periods: int
) -> EnergyMetrics:
    return EnergyMetrics(
        **beside,
        total_energy_kwh=None,
        cpu_energy_kwh=None,
        gpu_energy_kwh=None,
        ram_energy_kwh=None,
        total_emissions_kg_co2=None,
        duration_seconds=duration_seconds,
        sources={},
        num_periods=num_periods,
        tracking_mode=None,
        cpu_model=None,
        gpu_model=None,
        emissions_basis=None,
        reason=reason,
    )


def sum_windows(windows: Sequence[Mapping[str, Cell]], beside: InstrumentEnergy) -> EnergyMetrics:
    """The figures of windows that `read_windows` gave, at least one, and what stands beside them.

    A part that codecarbon gives as 0 was not read: None. Where GPUs are in use that it does not count, the total and
    the emissions are None, too.
    """
    figures = {name: _sum(windows, column) or None for name, column in _COLUMNS.items()}
    reasons = {name: READ_NOTHING for name, figure in figures.items() if figure is None}
    found = [gpu_problem(window) for window in windows]
    problem = next((each for each, _ in found if each is not None), None)
    if problem is not None:
        reasons["gpu_energy_kwh"] = problem
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
        "ram_energy_kwh": _ESTIMATE,
    }
    parts = {name: source for name, source in sources.items() if known[name] is not None}
    names = [source["source"] for source in parts.values()]
    told = [name for name in dict.fromkeys(names) if name is not None]
    total = EnergySource(source=" + ".join(told) if None not in names else None, kind="estimated")
    sums = {name: total for name in ("total_energy_kwh", "total_emissions_kg_co2") if known[name] is not None}
    return parts | sums


def _cpu_source(names: set[Cell]) -> EnergySource:
    """Of all windows; a file that codecarbon wrote itself does not say."""
    if names == {"rapl"}:
        return {"source": "rapl", "kind": "measured"}
    return _ESTIMATE if None not in names else {"source": None, "kind": None}


def _basis(windows: Sequence[Mapping[str, Cell]]) -> str | None:
    """As the file says; from the country where codecarbon wrote it itself."""
    told = [window.get("emissions_basis") or _basis_of_country(window["country_iso_code"]) for window in windows]
    return ", ".join(dict.fromkeys(map(str, told)))


def _basis_of_country(code: Cell) -> str:
    return WORLD_MEAN if code is None else f"electricity mix of {code}"


def _sum(windows: Sequence[Mapping[str, Cell]], column: str) -> float:
    return math.fsum(number_in(window, column) for window in windows)


def _text(cell: Cell) -> str | None:
    return None if cell in (None, "") else str(cell)
