"""Measurements of a device whose laws are known: what a fit has to find again."""

from collections.abc import Callable, Sequence

from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction.measurements import MeasuredInference, MeasuredLayer, Measurements
from experiments.performance_prediction.prediction.operations import network_operations

# Seconds: of a call and a FLOP; of another operation and its bytes; of the host for a convolution. Watts and joules.
CALL_S, FLOP_S = 10e-6, 1 / 20e12
OPERATION_S, BYTE_S = 4e-6, 1 / 4e12
HOST_S = 200e-6
WHOLE_W, FLOP_J = 100.0, 20e-12

Law = Callable[[ConvShape], float]


def quick_law(shape: ConvShape) -> float:
    """A constant and so much a FLOP."""
    return CALL_S + FLOP_S * shape.flops


def inference(
    model: str,
    requested: AlgorithmName,
    size: int,
    law: Law = quick_law,
    refuses: Callable[[ConvShape], bool] = lambda shape: False,
    fallback: Law = quick_law,
) -> MeasuredInference:
    """One inference by the laws above; layers that `refuses` names run `guess`."""
    operations = network_operations(model, size, 1)
    layers = tuple(
        MeasuredLayer(
            name,
            shape,
            requested,
            "implicit gemm" if refuses(shape) or requested == "guess" else requested,
            refuses(shape),
            "too large" if refuses(shape) else None,
            fallback(shape) if refuses(shape) else law(shape),
        )
        for name, shape in operations.convolutions.items()
    )
    moved = operations.other_bytes + operations.product_bytes
    device_s = sum(layer.latency_s for layer in layers) + OPERATION_S * operations.others + BYTE_S * moved
    whole_s = max(device_s, HOST_S * len(layers))
    flops = sum(layer.shape.flops for layer in layers)
    energy_j = WHOLE_W * whole_s + FLOP_J * flops
    return MeasuredInference(
        "NVIDIA H200", "fma", model, requested, size, 1, layers, device_s, whole_s, energy_j, whole_s
    )


def measurements(inferences: Sequence[MeasuredInference]) -> Measurements:
    """All with energy."""
    return Measurements(tuple(inferences), tuple(inferences))
