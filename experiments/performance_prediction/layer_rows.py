"""In: a profile of one input size; out: its rows of the table of layers, in the order of their calls. Pure."""

import math
from collections.abc import Mapping

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.distributions import describe
from experiment_core_utils.primitives.units import milliseconds
from experiments.performance_prediction.algorithm_support import LayerSupport
from experiments.performance_prediction.kernel_names import counted, without_arguments
from experiments.performance_prediction.profile_records import LayerPass, SizeProfile

LAYER_COLUMNS = (
    "layer", "in_channels", "out_channels", "kernel_size", "mean_ms", "percentage",
    "input_size", "batch_size", "input_height", "input_width", "output_height", "output_width", "stride", "padding",
    "dilation", "groups", "algorithm_asked", "algorithm_run", "engine", "fell_back", "refusal", "kernel_names",
    "workspace_bytes", "flops", "bytes", "flops_per_s", "share_of_peak", "arithmetic_intensity", "median_ms", "std_ms",
    "min_ms", "percentage_of_inference", "numerical_error", "numerical_error_reason", "energy_j", "energy_method",
    "model", "device_name", "precision",
)  # fmt: skip
APPORTIONED = "apportioned by time"


def layer_means_s(layers: LayerPass) -> dict[str, float]:
    """Mean time of each layer."""
    return {name: math.fsum(seconds) / len(seconds) for name, seconds in layers.layers_s.items()}


def layer_rows(
    profile: SizeProfile, element_bytes: int, peak_flops_per_s: float | None, known: Mapping[str, Cell]
) -> list[dict[str, Cell]]:
    """One row a layer.

    Args:
        element_bytes: of a number of input, weight and output.
        peak_flops_per_s: of the device in the numbers in force; None where it is not known.
        known: the cells `model`, `device_name` and `precision`.
    """
    means_s = layer_means_s(profile.layers)
    sum_s = math.fsum(means_s.values())
    inference_s = math.fsum(profile.layers.inferences_s) / len(profile.layers.inferences_s)
    rows = []
    for support in profile.report.layers:
        mean_s = means_s[support.layer]
        share = mean_s / inference_s
        joules = profile.energy.joules
        row = {
            **_shape_cells(support, element_bytes),
            **_time_cells(profile, support.layer),
            "percentage": 100 * mean_s / sum_s,
            "percentage_of_inference": 100 * share,
            "flops_per_s": support.shape.flops / mean_s,
            "share_of_peak": None if peak_flops_per_s is None else support.shape.flops / mean_s / peak_flops_per_s,
            "energy_j": None if joules is None else joules * share,
            "energy_method": None if joules is None else APPORTIONED,
            "input_size": profile.input_size,
            **known,
        }
        rows.append({column: row[column] for column in LAYER_COLUMNS})
    return rows


def _shape_cells(support: LayerSupport, element_bytes: int) -> dict[str, Cell]:
    shape = support.shape
    moved = shape.bytes(element_bytes)
    return {
        "layer": support.layer,
        "in_channels": shape.in_channels,
        "out_channels": shape.out_channels,
        "kernel_size": _by(shape.kernel),
        "batch_size": shape.batch,
        "input_height": shape.height,
        "input_width": shape.width,
        "output_height": shape.output_size[0],
        "output_width": shape.output_size[1],
        "stride": _by(shape.stride),
        "padding": _by(shape.padding),
        "dilation": _by(shape.dilation),
        "groups": shape.groups,
        "algorithm_asked": support.asked,
        "algorithm_run": support.runs,
        "engine": support.engine,
        "fell_back": support.fell_back,
        "refusal": support.reason,
        "workspace_bytes": support.workspace_bytes,
        "flops": shape.flops,
        "bytes": moved,
        "arithmetic_intensity": shape.flops / moved,
    }


def _time_cells(profile: SizeProfile, layer: str) -> dict[str, Cell]:
    spread = describe(profile.layers.layers_s[layer])
    assert spread is not None
    error = profile.errors[layer]
    kernels = None if profile.kernels is None else counted([*map(without_arguments, profile.kernels[layer])])
    return {
        "mean_ms": milliseconds(spread.mean),
        "median_ms": milliseconds(spread.p50),
        "std_ms": milliseconds(spread.std),
        "min_ms": milliseconds(spread.min),
        "numerical_error": error.relative,
        "numerical_error_reason": error.reason,
        "kernel_names": kernels,
    }


def _by(pair: tuple[int, int]) -> str:
    """ "3x3"."""
    return f"{pair[0]}x{pair[1]}"
