"""In: combinations of models and algorithms; out: their tables, one combination after the other."""

import sys

import torch
from torch import nn

from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.primitives.interruption import StopRequest
from experiments.performance_prediction.cnn_models.registry import build_model
from experiments.performance_prediction.convolution import AlgorithmRefused
from experiments.performance_prediction.power_monitor import PowerMonitor, instruments_of
from experiments.performance_prediction.profile_config import ProfileConfig, ProfiledPair
from experiments.performance_prediction.profile_provenance import device_label, identity_cells
from experiments.performance_prediction.profile_sweep import check_support, sweep
from experiments.performance_prediction.profiler import UnifiedProfiler
from experiments.performance_prediction.result_tables import ResultTables

# Of a combination that is not covered: it cannot be done as asked.
NOT_COVERED = 2


def run_profiles(config: ProfileConfig, stop: StopRequest) -> int:
    """Exit code: 0, or 2 where a combination is not covered; the others are measured all the same.

    Raises:
        ConfigurationError: the device here is not the one that was requested.
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
    for combination in config.combinations:
        if combination.settings.model != model:
            model = combination.settings.model
            built = build_model(model, combination.settings.seed)
        code = max(code, _run_one(UnifiedProfiler(built, combination.settings, monitor), combination, config, stop))
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
        f"{tables.overall_path}: {count.measured} sizes measured, {count.unmeasured} not measurable, "
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
