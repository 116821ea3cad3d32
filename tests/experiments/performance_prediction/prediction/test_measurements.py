"""Tables whose layers took far longer than the same work elsewhere are named."""

from dataclasses import replace

from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.prediction.measurements import (
    Disagreement,
    MeasuredLayer,
    agreement_lines,
    disagreements,
)

SHAPES = [ConvShape(1, channels, 32, 32, 16, (3, 3), (1, 1), (1, 1), (1, 1), 1) for channels in range(8, 28)]
PRECOMP = "implicit precomp gemm"


def ran(shape: ConvShape, requested: str, seconds: float) -> MeasuredLayer:
    """`implicit precomp gemm` did the work, whatever was requested."""
    return MeasuredLayer("layer", shape, requested, PRECOMP, requested not in ("guess", PRECOMP), None, seconds)  # type: ignore[arg-type]


def test_one_disturbed_table_is_named_and_the_others_are_not() -> None:
    # Against winograd's 8 ms stands a median of 1 ms; against the 1 ms of the others one of 4.5 (of 1 and 8).
    layers = [ran(shape, requested, 1e-3) for shape in SHAPES for requested in (PRECOMP, "guess")]
    layers += [ran(shape, "winograd", 8e-3) for shape in SHAPES]
    (found,) = disagreements(layers)
    assert found == Disagreement("winograd", len(SHAPES), len(SHAPES), 8.0)
    (line,) = agreement_lines(layers)
    assert line.startswith(
        f"caution: in the tables of winograd, {len(SHAPES)} of {len(SHAPES)} shapes took over 2 times"
    )


def test_the_same_shape_by_another_algorithm_is_no_disagreement() -> None:
    layers = [ran(shape, "guess", 1e-3) for shape in SHAPES]
    layers += [replace(ran(shape, "fft", 9e-3), runs="fft", fell_back=False) for shape in SHAPES]
    assert disagreements(layers) == []


def test_a_single_odd_layer_among_many_is_let_pass() -> None:
    layers = [ran(shape, requested, 1e-3) for shape in SHAPES for requested in ("guess", "fft")]
    layers += [ran(replace(SHAPES[0], batch=2), "guess", 1e-3), ran(replace(SHAPES[0], batch=2), "fft", 3e-3)]
    # 1 of 21 shared shapes is less than a tenth.
    assert disagreements(layers) == []
