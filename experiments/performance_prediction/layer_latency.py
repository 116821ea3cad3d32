"""In: measured layers of one algorithm on one device; out: the latency of any layer with it. Pure.

A sum of the algorithm's terms with coefficients of 0 and more, in relative least squares, and a Gaussian process for
the logarithm of what is left: near measured shapes it follows them, far from them the sum stands alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls
from scipy.stats import norm

from experiment_core_utils.primitives.distributions import CONFIDENCE
from experiments.performance_prediction.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.gaussian_process import GaussianProcess, Hyperparameters
from experiments.performance_prediction.layer_work import matrix_of_features, matrix_of_terms
from experiments.performance_prediction.prediction_tables import MeasuredLayer

# Fewer shapes than this are no basis for a fit.
LEAST_SHAPES = 8
_LOWEST_FRACTION = 0.1


@dataclass(frozen=True)
class PredictedLatency:
    """Seconds; `low` and `high` are the ends of the model's own interval of 95 %."""

    seconds: float
    low: float
    high: float


class LayerLatency:
    """Latency of layers with one algorithm on one device.

    Args:
        measured: seconds by shape, at least `LEAST_SHAPES`.
        hyperparameters: None to find them.
    """

    def __init__(
        self,
        algorithm: AlgorithmName,
        device: str,
        measured: Mapping[ConvShape, float],
        hyperparameters: Hyperparameters | None = None,
    ) -> None:
        self.algorithm, self.device, self.measured = algorithm, device, dict(measured)
        shapes, seconds = list(self.measured), np.array(list(self.measured.values()))
        terms = matrix_of_terms(shapes, algorithm, device)
        self._coefficients, _ = nnls(terms / seconds[:, None], np.ones(len(seconds)))
        self._floor_s = _LOWEST_FRACTION * float(seconds.min())
        rest = np.log(seconds / self._sum_of_terms(shapes))
        self._process = GaussianProcess(matrix_of_features(shapes, algorithm, device), rest, hyperparameters)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters of the Gaussian process."""
        return self._process.hyperparameters

    def predict(self, shapes: Sequence[ConvShape]) -> list[PredictedLatency]:
        """One for each shape."""
        if not shapes:
            return []
        mean, spread = self._process.predict(matrix_of_features(shapes, self.algorithm, self.device))
        seconds = self._sum_of_terms(shapes) * np.exp(mean)
        factor = np.exp(float(norm.ppf(0.5 + CONFIDENCE / 2)) * spread)
        ends = zip(seconds, seconds / factor, seconds * factor, strict=True)
        return [PredictedLatency(float(middle), float(low), float(high)) for middle, low, high in ends]

    def _sum_of_terms(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        terms = matrix_of_terms(shapes, self.algorithm, self.device)
        return np.maximum(terms @ self._coefficients, self._floor_s)


def seconds_by_shape(layers: Iterable[MeasuredLayer], algorithm: AlgorithmName) -> dict[ConvShape, float]:
    """Mean over the layers of each shape in which `algorithm` ran: for `guess` those that asked for it or fell back."""
    found: dict[ConvShape, list[float]] = {}
    for layer in layers:
        if layer.runs == algorithm or (algorithm == "guess" and (layer.asked == "guess" or layer.fell_back)):
            found.setdefault(layer.shape, []).append(layer.latency_s)
    return {shape: float(np.mean(seconds)) for shape, seconds in found.items()}
