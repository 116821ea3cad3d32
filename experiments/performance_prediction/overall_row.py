"""In: a profile of one input size, or why there is none; out: its row of the overall table. Pure."""

import math
from collections.abc import Mapping
from typing import Literal

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.distributions import describe
from experiment_core_utils.primitives.units import milliseconds
from experiments.performance_prediction.layer_rows import layer_means_s
from experiments.performance_prediction.profile_provenance import IDENTITY
from experiments.performance_prediction.profile_records import SizeProfile

Status = Literal["ok", "out_of_memory", "refused", "failed"]

FIRST_COLUMNS = (
    "model", "algorithm", "input_size", "mean", "std", "min", "max", "power_mean_w", "energy_per_inference_j",
)  # fmt: skip
MEASURED_COLUMNS = (
    "median", "p95", "ci95_low", "ci95_high", "images_per_s", "peak_memory_bytes", "peak_memory_reason",
    "layers_sum_ms", "uncovered_ms", "uncovered_share", "layer_pass_mean_ms", "num_layers", "layers_fell_back",
    "fell_back_time_share", "fell_back_flops_share", "conv_flops", "numerical_error_max", "energy_bound_j",
    "energy_window_s", "energy_source", "energy_basis", "energy_reason", "energy_remark", "num_warmup",
    "warmup_is_stable", "status", "reason",
)  # fmt: skip
PROVENANCE_COLUMNS = (
    *IDENTITY[2:], "cuda", "driver", "power_limit_w", "cpu_threads", "commit", "gpu", "sizes_asked", "timestamp",
)  # fmt: skip
OVERALL_COLUMNS = (*FIRST_COLUMNS, *MEASURED_COLUMNS, *PROVENANCE_COLUMNS)


def measured_row(profile: SizeProfile, batch_size: int) -> dict[str, Cell]:
    """The measured columns of a size that was measured."""
    whole = describe(profile.whole.inferences_s)
    in_pass = describe(profile.layers.inferences_s)
    assert whole is not None and in_pass is not None
    means_s = layer_means_s(profile.layers)
    sum_s = math.fsum(means_s.values())
    fell_back = [layer.layer for layer in profile.report.layers if layer.fell_back]
    errors = [error.relative for error in profile.errors.values() if error.relative is not None]
    memory, energy = profile.whole.memory, profile.energy
    return {
        "input_size": profile.input_size,
        "mean": milliseconds(whole.mean),
        "std": milliseconds(whole.std),
        "min": milliseconds(whole.min),
        "max": milliseconds(whole.max),
        "power_mean_w": energy.power_w,
        "energy_per_inference_j": energy.joules,
        "median": milliseconds(whole.p50),
        "p95": milliseconds(whole.p95),
        "ci95_low": milliseconds(whole.ci_low),
        "ci95_high": milliseconds(whole.ci_high),
        "images_per_s": batch_size / whole.mean,
        "peak_memory_bytes": memory.peak_memory_bytes,
        "peak_memory_reason": memory.reason,
        "layers_sum_ms": milliseconds(sum_s),
        "uncovered_ms": milliseconds(whole.mean - sum_s),
        "uncovered_share": 1 - sum_s / whole.mean,
        "layer_pass_mean_ms": milliseconds(in_pass.mean),
        "num_layers": len(profile.report.layers),
        "layers_fell_back": len(fell_back),
        "fell_back_time_share": math.fsum(means_s[layer] for layer in fell_back) / sum_s,
        "fell_back_flops_share": profile.report.refused_flops_share,
        "conv_flops": sum(layer.shape.flops for layer in profile.report.layers),
        "numerical_error_max": max(errors, default=None),
        "energy_bound_j": energy.bound_j,
        "energy_window_s": energy.window_s,
        "energy_source": energy.source,
        "energy_basis": energy.basis,
        "energy_reason": energy.reason,
        "energy_remark": energy.remark,
        "num_warmup": profile.whole.num_warmup,
        "warmup_is_stable": profile.whole.is_stable,
        "status": "ok",
        "reason": None,
    }


def unmeasured_row(input_size: int, status: Status, reason: str) -> dict[str, Cell]:
    """The same of a size that was not measured: no figure, and why."""
    return {**dict.fromkeys(MEASURED_COLUMNS), "input_size": input_size, "status": status, "reason": reason}


def complete_row(measured: Mapping[str, Cell], provenance: Mapping[str, Cell]) -> dict[str, Cell]:
    """All columns in their order; None where a row has no figure."""
    known = {**measured, **provenance}
    return {column: known.get(column) for column in OVERALL_COLUMNS}
