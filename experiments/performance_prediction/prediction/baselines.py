"""Two plain models of a layer's latency: the roofline, and a line."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiment_core_utils.meters.host_facts import known_peaks
from experiments.fitting.regression import relative_nonnegative
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction.operations import NetworkOperations

_ELEMENT_BYTES = 4
_PRODUCTS = {"fma": "float32", "tf32": "tf32", "half": "float16"}


class Roofline:
    """The roofline: FLOPs / peak or bytes / bandwidth, whichever is longer, whatever the algorithm; nothing is fitted.

    The peaks are the data sheet's. `reason` says why there are none: then nothing can be predicted.
    """

    def __init__(self, device: str, precision: str) -> None:
        peaks = known_peaks(device, _PRODUCTS[precision])
        self._flops_per_s, self._bytes_per_s = peaks.flops_per_s, peaks.bytes_per_s
        self.reason = peaks.reason

    def layer_s(self, shape: ConvShape) -> float:
        """Seconds of one layer; `reason` is None."""
        assert self._flops_per_s is not None and self._bytes_per_s is not None
        return max(shape.flops / self._flops_per_s, shape.bytes(_ELEMENT_BYTES) / self._bytes_per_s)

    def rest_s(self, operations: NetworkOperations) -> float:
        """Seconds of the other operations: their bytes / bandwidth."""
        assert self._bytes_per_s is not None
        return (operations.other_bytes + operations.product_bytes) / self._bytes_per_s


class LinearLatency:
    """A constant and factors of FLOPs and bytes for each algorithm, by relative least squares of 0 and more."""

    def __init__(self, measured: Mapping[AlgorithmName, Mapping[ConvShape, float]]) -> None:
        self._coefficients = {
            algorithm: relative_nonnegative(_columns(list(seconds)), np.array(list(seconds.values())), scaled=True)
            for algorithm, seconds in measured.items()
        }

    def layer_s(self, shape: ConvShape, algorithm: AlgorithmName) -> float:
        """Seconds of one layer with an algorithm that was measured."""
        return float(_columns([shape])[0] @ self._coefficients[algorithm])


def _columns(shapes: Sequence[ConvShape]) -> np.ndarray:
    return np.array([[1.0, shape.flops, shape.bytes(_ELEMENT_BYTES)] for shape in shapes], dtype=np.float64)
