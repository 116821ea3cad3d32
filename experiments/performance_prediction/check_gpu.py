"""Which convolution algorithm a GPU really runs: granted or why not, error, time and kernel names, layer by layer.

knobprof convolutions check --output check_gpu.json
"""

import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.device import choose_device, out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import ProfilerError, first_line
from experiment_core_utils.primitives.files import write_json_atomically
from experiments.performance_prediction.algorithms.convolution import (
    ALGORITHMS,
    AlgorithmName,
    ConvShape,
    Precision,
    PreparedConvolution,
)
from experiments.performance_prediction.algorithms.engines import Placement, prepare, torch_precision
from experiments.performance_prediction.algorithms.reference import error_bound, float64_reference, relative_l2
from experiments.performance_prediction.algorithms.support import conv_shapes
from experiments.performance_prediction.networks.registry import MODELS, build_model
from experiments.performance_prediction.profiler import seconds_of
from experiments.performance_prediction.profiling.network import SwappedConvolutions
from experiments.performance_prediction.profiling.passes import counted, kernel_names, without_arguments

Row = TypeVar("Row")

LAYERS: Mapping[str, ConvShape] = {
    "vgg16 3x3 64 @224": ConvShape(1, 64, 224, 224, 64, (3, 3), padding=(1, 1)),
    "vgg16 3x3 512 @14": ConvShape(1, 512, 14, 14, 512, (3, 3), padding=(1, 1)),
    "vgg16 3x3 64 @512": ConvShape(1, 64, 512, 512, 64, (3, 3), padding=(1, 1)),
    "alexnet 11x11 s4 @224": ConvShape(1, 3, 224, 224, 64, (11, 11), (4, 4), (2, 2)),
    "alexnet 5x5 @27": ConvShape(1, 64, 27, 27, 192, (5, 5), padding=(2, 2)),
    "resnet 7x7 s2 @224": ConvShape(1, 3, 224, 224, 64, (7, 7), (2, 2), (3, 3)),
    "resnet 1x1 256-64 @56": ConvShape(1, 256, 56, 56, 64, (1, 1)),
    "resnet 1x1 s2 @56": ConvShape(1, 256, 56, 56, 512, (1, 1), (2, 2)),
    "resnet 3x3 s2 @56": ConvShape(1, 128, 56, 56, 128, (3, 3), (2, 2), (1, 1)),
    "densenet 3x3 128-32 @28": ConvShape(8, 128, 28, 28, 32, (3, 3), padding=(1, 1)),
    "grouped 3x3 @28": ConvShape(1, 128, 28, 28, 128, (3, 3), padding=(1, 1), groups=32),
}
# Layers that are repeated with TF32 allowed.
TF32_LAYERS = ("vgg16 3x3 512 @14", "vgg16 3x3 64 @512", "alexnet 5x5 @27", "resnet 1x1 256-64 @56")
TIME_OVER = "not tried: --seconds is over"
WARMUP, LAUNCHES, REPEATS, REPEAT_S = 2, 20, 5, 0.02


@dataclass(frozen=True)
class LayerRow:
    """The results of one algorithm in one layer; None where it was refused, with the reason."""

    layer: str
    precision: str
    requested: str
    runs: str | None = None
    engine: str | None = None
    ms: float | None = None
    relative_error: float | None = None
    error_bound: float | None = None
    workspace_bytes: int | None = None
    kernels: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True)
class ModelRow:
    """The results of one algorithm in a whole network, `guess` where it is refused."""

    model: str
    algorithm: str
    convolutions: int | None
    fell_back: int | None = None
    fell_back_flops_share: float | None = None
    ms: float | None = None
    torch_ms: float | None = None
    relative_to_torch: float | None = None
    reason: str | None = None


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, the median over repeats of up to `LAUNCHES` calls in a row that fill `REPEAT_S`."""
    for _ in range(WARMUP):
        run()
    launches = min(max(int(REPEAT_S / seconds_of(run, device)), 1), LAUNCHES)
    return statistics.median(seconds_of(run, device, launches) for _ in range(REPEATS)) / launches * 1e3


def layer_row(layer: str, algorithm: AlgorithmName, shape: ConvShape, placement: Placement) -> LayerRow:
    """The row of one combination, also where it is refused or fails."""
    requested = LayerRow(layer, placement.precision, algorithm)
    try:
        with closing(prepare(algorithm, shape, placement)) as prepared:
            return measured(requested, prepared, placement)
    except (ProfilerError, RuntimeError) as error:
        return replace(requested, reason=f"{type(error).__name__}: {first_line(error)}")


def measured(requested: LayerRow, prepared: PreparedConvolution, placement: Placement) -> LayerRow:
    """The row of a granted algorithm."""
    shape, device = prepared.shape, placement.device
    generator = torch.Generator(device).manual_seed(0)
    given = torch.randn(shape.input_shape, generator=generator, device=device)
    weight = torch.randn(shape.weight_shape, generator=generator, device=device) / shape.products_per_output**0.5
    call = partial(prepared.run, given, weight)
    with out_of_memory_named(), torch.inference_mode():
        error = relative_l2(call(), float64_reference(given, weight, shape))
        ms = milliseconds(call, device)
        names = kernel_names(call, device)
    bound = error_bound(prepared.runs, shape, placement.dtype, placement.precision)
    return replace(
        requested, runs=prepared.runs, engine=prepared.engine, ms=ms, relative_error=error, error_bound=bound,
        workspace_bytes=prepared.workspace_bytes, kernels=names,
    )  # fmt: skip


def layer_rows(
    layers: Mapping[str, ConvShape], device: torch.device, precision: Precision, deadline: float
) -> Iterator[LayerRow]:
    """The rows of every layer with every algorithm; after the deadline a row says so."""
    placement = Placement(device, precision=precision)
    for layer, shape in layers.items():
        for algorithm in ALGORITHMS:
            if monotonic() > deadline:
                yield LayerRow(layer, precision, algorithm, reason=TIME_OVER)
            else:
                yield layer_row(layer, algorithm, shape, placement)
        release_cached_memory(device)


def model_rows(name: str, size: int, device: torch.device, deadline: float) -> Iterator[ModelRow]:
    """The rows of a whole network with every algorithm against torch, until the deadline."""
    if monotonic() > deadline:
        yield from (
            ModelRow(name, algorithm, None, reason=TIME_OVER) for algorithm in ALGORITHMS if algorithm != "torch"
        )
        return
    images = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1)).to(device)
    model = build_model(name).to(device)
    shapes = conv_shapes(model, images.shape)
    with torch.inference_mode():
        expected = model(images).double()
        torch_ms = milliseconds(lambda: model(images), device)
    for algorithm in ALGORITHMS:
        if algorithm == "torch":
            continue
        if monotonic() > deadline:
            yield ModelRow(name, algorithm, len(shapes), reason=TIME_OVER)
            continue
        try:
            with (
                torch.inference_mode(),
                out_of_memory_named(),
                SwappedConvolutions(model, shapes, algorithm, Placement(images.device), "fallback", name) as swapped,
            ):
                error = relative_l2(model(images), expected)
                ms = milliseconds(lambda: model(images), images.device)
                report = swapped.report
        except (ProfilerError, RuntimeError) as error_found:
            reason = f"{type(error_found).__name__}: {first_line(error_found)}"
            yield ModelRow(name, algorithm, len(shapes), reason=reason)
        else:
            share = report.refused_flops_share
            yield ModelRow(name, algorithm, len(shapes), len(report.refused), share, ms, torch_ms, error)


def layer_line(row: LayerRow) -> str:
    """A line of the table of layers."""
    head = f"{row.layer:24} {row.precision:5} {row.requested:22}"
    if row.reason is not None:
        return f"{head} - {row.reason}"
    beyond = "" if row.relative_error is not None and row.relative_error <= (row.error_bound or 0) else " BEYOND"
    error = f"{row.relative_error:.1e} (bound {row.error_bound:.0e}{beyond})"
    workspace = "-" if row.workspace_bytes is None else f"{row.workspace_bytes / 2**20:.1f}"
    runs = "" if row.runs == row.requested else f" runs {row.runs};"
    kernels = counted([without_arguments(name)[:70] for name in row.kernels])
    return f"{head} {row.engine:10} {row.ms:8.4f} ms  error {error}  {workspace:>7} MiB {runs} {kernels}"


def model_line(row: ModelRow) -> str:
    """A line of the table of networks."""
    head = f"{row.model:12} {row.algorithm:22}"
    if row.reason is not None:
        return f"{head} - {row.reason}"
    return (
        f"{head} {row.ms:8.2f} ms (torch {row.torch_ms:.2f})  against torch {row.relative_to_torch:.1e}  fell back "
        f"{row.fell_back} of {row.convolutions} layers, {row.fell_back_flops_share:.0%} of FLOPs"
    )


def system(device: torch.device) -> dict[str, object]:
    """The system that the figures are valid for."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "device": gpu.name if gpu else platform.processor(),
        "compute_capability": f"{gpu.major}.{gpu.minor}" if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
    }


def all_layer_rows(device: torch.device, started: float, seconds: float) -> Iterator[LayerRow]:
    """Rows of all layers in float32, then a few with TF32 on a GPU, within two thirds of the time."""
    with torch_precision("fma"):
        yield from layer_rows(LAYERS, device, "fma", started + 0.5 * seconds)
    if device.type == "cuda":
        with torch_precision("tf32"):
            repeated = {name: LAYERS[name] for name in TF32_LAYERS}
            yield from layer_rows(repeated, device, "tf32", started + 0.65 * seconds)


def printed(rows: Iterable[Row], line: Callable[[Row], str]) -> Iterator[Row]:
    """The rows, each printed as it is measured."""
    for row in rows:
        print(line(row), flush=True)
        yield row


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Check this machine. Exit code: 0 written, 1 the file cannot be, 2 a flag is wrong."""
    parser = OneLineParser(
        prog="check_gpu.py",
        description="Compare every convolution algorithm with torch's on this machine, layer by layer and in whole "
        "networks.",
        examples=("knobprof convolutions check --output check_gpu.json",),
    )
    parser.add_argument("--output", type=Path, default=Path("check_gpu.json"), metavar="FILE", help="JSON file")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to check")
    parser.add_argument(
        "--seconds", type=float, default=75.0, metavar="SECONDS", help="seconds after which nothing new is started"
    )
    parser.add_argument("--input_size", type=int, default=224, help="input size of the whole networks")
    arguments = parser.parse_args(argv)
    started = monotonic()
    device = choose_device(arguments.device)
    print(system(device), flush=True)
    layers = list(printed(all_layer_rows(device, started, arguments.seconds), layer_line))
    with torch_precision("fma"):
        found = (model_rows(name, arguments.input_size, device, started + arguments.seconds) for name in MODELS)
        models = list(printed(chain.from_iterable(found), model_line))
    content = {
        "system": system(device),
        "layers": [asdict(row) for row in layers],
        "models": [asdict(each) for each in models],
        "seconds": monotonic() - started,
    }
    write_json_atomically(content, arguments.output)
    print(f"{arguments.output} written after {monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(run_command(main))
