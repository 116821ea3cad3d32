"""In: a profiler and input sizes; out: a row for each size in the combination's tables, at once when it is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import OutOfMemory, SettingError, first_line
from experiment_core_utils.primitives.interruption import StopRequest
from experiments.performance_prediction.algorithm_support import CombinationReport
from experiments.performance_prediction.convolution import AlgorithmRefused
from experiments.performance_prediction.layer_rows import layer_rows
from experiments.performance_prediction.overall_row import Status, complete_row, measured_row, unmeasured_row
from experiments.performance_prediction.profile_provenance import peaks_of, provenance_cells, timestamp
from experiments.performance_prediction.profiler import UnifiedProfiler
from experiments.performance_prediction.result_tables import ResultTables

Rows = tuple[dict[str, Cell], list[dict[str, Cell]]]


@dataclass(frozen=True)
class SweepCount:
    """Sizes of a combination: measured now, not measurable, there already."""

    measured: int
    unmeasured: int
    found: int


def check_support(profiler: UnifiedProfiler, sizes: Sequence[int]) -> list[str]:
    """Asks at the smallest and the largest size, between which an algorithm's limit may lie, before anything is timed.

    Returns:
        Lines for the user where layers are not covered; such sizes become rows, or layers of them fall back.

    Raises:
        AlgorithmRefused: without fallback, where neither size is covered; all layers and reasons in the lines. With it,
            where the fallback is refused as well.
        ConfigurationError: as `UnifiedProfiler.support`.
    """
    ends = sorted({min(sizes), max(sizes)})
    reports = {size: report for size in ends if (report := _report(profiler, size)) is not None}
    lines = [
        line
        for size, report in reports.items()
        if report.refused
        for line in [f"at {size} pixels: {report.lines()[0]}", *report.lines()[1:]]
    ]
    uncovered = [report for report in reports.values() if report.refused]
    if profiler.settings.on_unsupported == "fail" and uncovered and len(uncovered) == len(reports):
        raise AlgorithmRefused("\n".join([*lines, "--on-unsupported fallback runs guess in these layers"]))
    return lines


def _report(profiler: UnifiedProfiler, size: int) -> CombinationReport | None:
    """None where it cannot be asked for, for lack of memory or because cuDNN broke off: the size's row will say so."""
    try:
        return profiler.support(size)
    except AlgorithmRefused:
        raise
    except SettingError:
        return None
    finally:
        release_cached_memory(profiler.settings.placement.device)


def sweep(
    profiler: UnifiedProfiler, tables: ResultTables, sizes: Sequence[int], gpu: str, stop: StopRequest
) -> SweepCount:
    """Every size that has no row yet.

    Raises:
        Stopped: someone asked for it, between two sizes.
        ResultsError, ResultsNotSaved: as `ResultTables`.
    """
    done = tables.done_sizes()
    provenance = {**provenance_cells(profiler.settings), "gpu": gpu, "sizes_asked": len(sizes)}
    missing = [size for size in sizes if size not in done]
    measured = 0
    # On a terminal only; elsewhere the lines tell.
    with tqdm(total=len(sizes), initial=len(sizes) - len(missing), unit="size", disable=None) as bar:
        bar.set_description(tables.folder.name)
        for size in missing:
            stop.raise_if_requested("between two input sizes")
            overall, layers = _rows_of(profiler, size, provenance)
            tables.append(overall, layers)
            measured += overall["status"] == "ok"
            bar.write(_line(tables.folder.name, overall))
            bar.update()
    return SweepCount(measured, len(missing) - measured, len(sizes) - len(missing))


def _rows_of(profiler: UnifiedProfiler, size: int, provenance: Mapping[str, Cell]) -> Rows:
    settings = profiler.settings
    try:
        profile = profiler.profile(size)
    except SettingError as error:
        overall, layers = unmeasured_row(size, _status(error), first_line(error)), []
    else:
        overall = measured_row(profile, settings.batch_size)
        known = {name: provenance[name] for name in ("model", "device_name", "precision")}
        peak = peaks_of(settings.placement).flops_per_s
        layers = layer_rows(profile, settings.placement.dtype.itemsize, peak, known)
    release_cached_memory(settings.placement.device)
    return complete_row(overall, {**provenance, "timestamp": timestamp()}), layers


def _status(error: SettingError) -> Status:
    if isinstance(error, OutOfMemory):
        return "out_of_memory"
    return "refused" if isinstance(error, AlgorithmRefused) else "failed"


def _line(name: str, row: Mapping[str, Cell]) -> str:
    if row["status"] != "ok":
        return f"{name} @{row['input_size']}: {row['status']}: {row['reason']}"
    power = (
        "" if row["power_mean_w"] is None else f", {row['power_mean_w']:.0f} W, {row['energy_per_inference_j']:.4g} J"
    )
    return (
        f"{name} @{row['input_size']}: {row['mean']:.3f} ms (layers {row['layers_sum_ms']:.3f}){power}, "
        f"{row['layers_fell_back']} of {row['num_layers']} layers fell back"
    )
