"""The two CSV files of one combination, complete at every moment, and their rows.

A size counts as done once its row is in the overall table, which is written after the table of layers. Layers of a size
that has no row there come from a run that was killed between the two, and are dropped by the next run.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from experiment_core_utils.primitives.csv_tables import Cell, csv_of_rows, read_table_file
from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import write_text_atomically
from experiment_core_utils.primitives.statistics import describe
from experiment_core_utils.primitives.units import milliseconds
from experiment_core_utils.records.locks import locked
from experiments.performance_prediction.algorithms.support import LayerSupport
from experiments.performance_prediction.profiling.passes import counted, without_arguments
from experiments.performance_prediction.profiling.records import IDENTITY, LayerPass, SizeProfile

LAYER_COLUMNS = (
    "layer", "in_channels", "out_channels", "kernel_size", "mean_ms", "percentage",
    "input_size", "batch_size", "input_height", "input_width", "output_height", "output_width", "stride", "padding",
    "dilation", "groups", "algorithm_asked", "algorithm_run", "engine", "fell_back", "refusal", "kernel_names",
    "workspace_bytes", "flops", "bytes", "flops_per_s", "share_of_peak", "arithmetic_intensity", "median_ms", "std_ms",
    "min_ms", "percentage_of_inference", "numerical_error", "numerical_error_reason", "energy_j", "energy_method",
    "launch_bound", "model", "device_name", "precision",
)  # fmt: skip
APPORTIONED = "apportioned by time"


def layer_means_s(layers: LayerPass) -> dict[str, float]:
    """The mean time of each layer."""
    return {name: math.fsum(seconds) / len(seconds) for name, seconds in layers.layers_s.items()}


def layer_rows(
    profile: SizeProfile, element_bytes: int, peak_flops_per_s: float | None, known: Mapping[str, Cell]
) -> list[dict[str, Cell]]:
    """The rows of layers.

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
        "algorithm_asked": support.requested,
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
    waiting = profile.layers.launch_bound
    kernels = None if profile.kernels is None else counted([*map(without_arguments, profile.kernels[layer])])
    return {
        "mean_ms": milliseconds(spread.mean),
        "median_ms": milliseconds(spread.p50),
        "std_ms": milliseconds(spread.std),
        "min_ms": milliseconds(spread.min),
        "numerical_error": error.relative,
        "numerical_error_reason": error.reason,
        "kernel_names": kernels,
        "launch_bound": None if waiting is None else layer in waiting,
    }


def _by(pair: tuple[int, int]) -> str:
    """A pair as text, such as "3x3"."""
    return f"{pair[0]}x{pair[1]}"


Status = Literal["ok", "out_of_memory", "refused", "failed"]
FIRST_COLUMNS = (
    "model", "algorithm", "input_size", "mean", "std", "min", "max", "power_mean_w", "energy_per_inference_j",
)  # fmt: skip
MEASURED_COLUMNS = (
    "median", "p95", "ci95_low", "ci95_high", "images_per_s", "peak_memory_bytes", "peak_memory_reason",
    "layers_sum_ms", "uncovered_ms", "uncovered_share", "layer_pass_mean_ms", "num_layers", "layers_fell_back",
    "fell_back_time_share", "fell_back_flops_share", "conv_flops", "numerical_error_max", "energy_bound_j",
    "energy_window_s", "energy_source", "energy_basis", "energy_reason", "energy_remark", "num_warmup",
    "warmup_is_stable", "launch_bound", "status", "reason",
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
        **{name: milliseconds(getattr(whole, name)) for name in ("mean", "std", "min", "max", "p95")},
        "power_mean_w": energy.power_w,
        "energy_per_inference_j": energy.joules,
        "median": milliseconds(whole.p50),
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
        **{
            f"energy_{name}": getattr(energy, name)
            for name in ("bound_j", "window_s", "source", "basis", "reason", "remark")
        },
        "num_warmup": profile.whole.num_warmup,
        "warmup_is_stable": profile.whole.is_stable,
        "launch_bound": profile.layers.is_launch_bound,
        "status": "ok",
        "reason": None,
    }


def unmeasured_row(input_size: int, status: Status, reason: str) -> dict[str, Cell]:
    """The measured columns of a size that was not measured: no figure, and the reason."""
    return {**dict.fromkeys(MEASURED_COLUMNS), "input_size": input_size, "status": status, "reason": reason}


def complete_row(measured: Mapping[str, Cell], provenance: Mapping[str, Cell]) -> dict[str, Cell]:
    """The row with all columns in their order; None in columns that it has no figure for."""
    known = {**measured, **provenance}
    return {column: known.get(column) for column in OVERALL_COLUMNS}


Row = Mapping[str, Cell]


class ResultTables:
    """The tables of a model with an algorithm on a device.

    Args:
        stage_folder: such as `results/3_full`.
        gpu: the device's label.
        identity: what all rows agree in, by column.
    """

    def __init__(self, stage_folder: Path, gpu: str, identity: Row) -> None:
        name = f"{identity['model']}_{str(identity['algorithm']).replace(' ', '_')}"
        self._identity = identity
        self.folder = stage_folder / f"{name}_{gpu}"
        self.overall_path = self.folder / f"{name}_overall.csv"
        self.layers_path = self.folder / f"{name}_layers.csv"

    def done_sizes(self) -> frozenset[int]:
        """The input sizes that have a row.

        Raises:
            ResultsError: the table is of another model, device, precision, …, or not one of this version's.
        """
        return frozenset(whole_number(row["input_size"]) for row in self._overall())

    def append(self, overall: Row, layers: Sequence[Row]) -> None:
        """Append one size's rows, unless another process has written them meanwhile. Raises as `done_sizes`."""
        with locked(self.overall_path):
            known = self._overall()
            done = {whole_number(row["input_size"]) for row in known}
            if overall["input_size"] in done:
                return
            kept = [row for row in _rows(self.layers_path, LAYER_COLUMNS) if whole_number(row["input_size"]) in done]
            write_text_atomically(csv_of_rows([*kept, *layers], LAYER_COLUMNS), self.layers_path)
            write_text_atomically(csv_of_rows([*known, overall], OVERALL_COLUMNS), self.overall_path)

    def _overall(self) -> list[dict[str, Cell]]:
        rows = _rows(self.overall_path, OVERALL_COLUMNS)
        for row in rows:
            others = [
                f"{name} {row[name]!r}, not {self._identity[name]!r}"
                for name in IDENTITY
                if row[name] != self._identity[name]
            ]
            if others:
                raise ResultsError(
                    f"{self.overall_path} contains rows of {', '.join(others)}; choose another --output-dir or "
                    f"delete it"
                )
        return rows


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, Cell]]:
    advice = "choose another --output-dir or delete it"
    return rows_with_columns(path, columns, advice) if path.exists() else []


def rows_with_columns(path: Path, columns: Sequence[str], advice: str) -> list[dict[str, Cell]]:
    """The rows of a table with just these columns; raises ResultsRefused for another or a broken one, with the
    advice.
    """
    try:
        rows = read_table_file(path)
    except ResultsError as error:
        raise ResultsRefused(f"{error}; {advice}") from error
    if rows and tuple(rows[0]) != tuple(columns):
        raise ResultsRefused(f"{path} has other columns than this version's; {advice}")
    return rows


def whole_number(cell: Cell) -> int:
    """The cell of a size or a count; raises ResultsError for anything else."""
    if not isinstance(cell, int):
        raise ResultsError(f"{cell!r} is not a whole number; the table is not one of this version's")
    return cell
