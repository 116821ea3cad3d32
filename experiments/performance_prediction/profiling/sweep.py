"""Profiles of combinations of models and algorithms, measured one after the other into their tables."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    OutOfMemory,
    SettingError,
    first_line,
)
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER
from experiments.performance_prediction.algorithms.convolution import AlgorithmRefused
from experiments.performance_prediction.algorithms.support import CombinationReport
from experiments.performance_prediction.networks.registry import build_model
from experiments.performance_prediction.profiler import PowerMonitor, UnifiedProfiler, instruments_of
from experiments.performance_prediction.profiling.config import ProfileConfig, ProfiledPair
from experiments.performance_prediction.profiling.records import (
    device_label,
    identity_cells,
    peaks_of,
    provenance_cells,
    timestamp,
)
from experiments.performance_prediction.profiling.tables import (
    ResultTables,
    Status,
    complete_row,
    layer_rows,
    measured_row,
    unmeasured_row,
)

Rows = tuple[dict[str, Cell], list[dict[str, Cell]]]


@dataclass(frozen=True)
class SweepCount:
    """The numbers of a combination's sizes: measured now, not measurable, measured before."""

    measured: int
    unmeasured: int
    found: int


def check_support(profiler: UnifiedProfiler, sizes: Sequence[int]) -> list[str]:
    """Check the smallest and largest size, between which an algorithm's limit may be, before anything is timed.

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
    """The report of a size; None where memory was too small or cuDNN failed, which the size's row will say."""
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
    """Measure every size that has no row yet.

    Raises:
        Stopped: a stop was requested, between two sizes.
        ResultsError, ResultsNotSaved: as `ResultTables`.
    """
    done = tables.done_sizes()
    provenance = {**provenance_cells(profiler.settings), "gpu": gpu, "sizes_asked": len(sizes)}
    missing = [size for size in sizes if size not in done]
    measured = 0
    # On a terminal only; elsewhere the lines show it.
    with tqdm(total=len(sizes), initial=len(sizes) - len(missing), unit="size", disable=None) as bar:
        bar.set_description(tables.folder.name)
        for size in missing:
            stop.raise_if_requested("between two input sizes")
            settings = profiler.settings
            try:
                profile = profiler.profile(size)
            except SettingError as error:
                overall, layers = unmeasured_row(size, _status(error), first_line(error)), []
            else:
                overall = measured_row(profile, settings.batch_size)
                origin = {name: provenance[name] for name in ("model", "device_name", "precision")}
                peak = peaks_of(settings.placement).flops_per_s
                layers = layer_rows(profile, settings.placement.dtype.itemsize, peak, origin)
            release_cached_memory(settings.placement.device)
            overall = complete_row(overall, {**provenance, "timestamp": timestamp()})
            tables.append(overall, layers)
            measured += overall["status"] == "ok"
            bar.write(_line(tables.folder.name, overall))
            bar.update()
    return SweepCount(measured, len(missing) - measured, len(sizes) - len(missing))


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


# Of a combination that is not covered: it cannot be done as requested.
NOT_COVERED = 2


def run_profiles(config: ProfileConfig, stop: StopRequest) -> int:
    """Run all profiles. Exit code: 0, or 2 where a combination is not covered; the others are measured all the same.

    Raises:
        ConfigurationError: the device here is not the one that was requested.
        ResultsRefused: another run profiles into this folder, and the two would disturb each other's times.
        MeterUnavailable: energy is required and nothing measures it.
        Stopped, ResultsError, ResultsNotSaved: as `sweep`.
    """
    device = config.combinations[0].settings.placement.device
    label = device_label(device)
    if config.gpu is not None and config.gpu.lower() != label:
        raise ConfigurationError(
            f"--gpu {config.gpu} was given, but the device here is {label}; drop --gpu to run on it"
        )
    monitor = _monitor(config, device)
    code = 0
    model, built = "", nn.Module()
    with only_run_in(config.output_dir / PARTS_FOLDER) as lock, stop.watching(lock.refresh):
        for combination in config.combinations:
            if combination.settings.model != model:
                model = combination.settings.model
                built = build_model(model, combination.settings.seed)
            profiler = UnifiedProfiler(built, combination.settings, monitor)
            code = max(code, _run_one(profiler, combination, config, stop))
    return code


def _run_one(profiler: UnifiedProfiler, combination: ProfiledPair, config: ProfileConfig, stop: StopRequest) -> int:
    label = device_label(profiler.settings.placement.device)
    tables = ResultTables(config.output_dir / config.stage, label, identity_cells(profiler.settings))
    missing = set(combination.sizes) - tables.done_sizes()
    if missing:
        stop.raise_if_requested("before anything was timed")
        try:
            lines = check_support(profiler, combination.sizes)
        except AlgorithmRefused as refused:
            print(f"error: {refused}", file=sys.stderr)
            return NOT_COVERED
        for line in lines:
            print(line)
    count = sweep(profiler, tables, combination.sizes, label, stop)
    print(
        f"{tables.overall_path}: {counted(count.measured, 'size')} measured, {count.unmeasured} not measurable, "
        f"{count.found} there already"
    )
    return 0


def _monitor(config: ProfileConfig, device: torch.device) -> PowerMonitor:
    if config.energy == "off":
        return PowerMonitor(None)
    using = instruments_of(device)
    try:
        using.require_any()
    except MeterUnavailable as error:
        if config.energy == "required":
            raise MeterUnavailable(f"--energy required: {error}; use --energy optional to run without it") from error
        print(f"no energy: {error}", file=sys.stderr)
    return PowerMonitor(using.calibrated(), WindowGoal(least_s=config.energy_window_s))
