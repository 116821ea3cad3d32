"""The latency of any layer with one algorithm on one device, fitted to measured layers.

It is a sum of the algorithm's terms with coefficients of 0 and more, in relative least squares, and a Gaussian process
for the logarithm of what is left: near measured shapes the process follows them, far from them only the sum counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize
from scipy.stats import norm

from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiments.fitting.regression import relative_nonnegative
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction.measurements import MeasuredLayer
from experiments.performance_prediction.prediction.work import matrix_of_features, matrix_of_terms

# Of the prior on a length, in units of the feature's standard deviation: median, and spread of the logarithm.
_LENGTH, _LENGTH_SPREAD = 3.0, 1.5
_LENGTH_BOUNDS, _SIGNAL_BOUNDS, _NOISE_BOUNDS = (-2.0, 4.0), (-4.0, 2.0), (-5.5, 0.0)
_LEAST_NOISE = 1e-6
# Points that the lengths are found from, drawn with a fixed seed, and steps of the search.
_POINTS, _STEPS = 250, 25


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters as natural logarithms.

    Attributes:
        lengths: of each feature, in units of its standard deviation over the points.
        signal, noise: standard deviations of the values.
    """

    lengths: tuple[float, ...]
    signal: float
    noise: float


class GaussianProcess:
    """A process through given points, with mean 0 far from them.

    Args:
        features: [N, F].
        values: [N].
        hyperparameters: None to find them from the points.
    """

    def __init__(
        self, features: np.ndarray, values: np.ndarray, hyperparameters: Hyperparameters | None = None
    ) -> None:
        self._centre = features.mean(axis=0)
        spread = features.std(axis=0)
        self._scale = np.where(spread > 1e-9, spread, np.inf)
        self._points = self._scaled(features)
        self.hyperparameters = hyperparameters or _likeliest(self._points, values)
        lengths, signal, noise = _natural(self.hyperparameters)
        covariance = signal**2 * _matern(_squared(self._points, self._points, lengths))
        self._factor = cholesky(covariance + (noise**2 + _LEAST_NOISE) * np.eye(len(values)), lower=True)
        self._weights = cho_solve((self._factor, True), values)

    def predict(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation (noise included) at each of [M, F]."""
        lengths, signal, noise = _natural(self.hyperparameters)
        covariance = signal**2 * _matern(_squared(self._scaled(features), self._points, lengths))
        known = solve_triangular(self._factor, covariance.T, lower=True)
        variance = np.maximum(signal**2 - (known**2).sum(axis=0), 0.0) + noise**2
        return covariance @ self._weights, np.sqrt(variance)

    def _scaled(self, features: np.ndarray) -> np.ndarray:
        return (features - self._centre) / self._scale


def _natural(given: Hyperparameters) -> tuple[np.ndarray, float, float]:
    return np.exp(np.array(given.lengths)), float(np.exp(given.signal)), float(np.exp(given.noise))


def _squared(first: np.ndarray, second: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Squared distances [N, M]."""
    a, b = first / lengths, second / lengths
    return np.maximum((a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None] - 2 * a @ b.T, 0.0)


def _matern(squared: np.ndarray) -> np.ndarray:
    distance = np.sqrt(3 * squared)
    return (1 + distance) * np.exp(-distance)


def _likeliest(points: np.ndarray, values: np.ndarray) -> Hyperparameters:
    chosen = np.random.default_rng(0).permutation(len(values))[:_POINTS]
    count = points.shape[1]
    differences = (points[chosen][:, None, :] - points[chosen][None, :, :]) ** 2
    begin = np.array([np.log(2.0)] * count + [np.log(0.3), np.log(0.05)])
    bounds = [_LENGTH_BOUNDS] * count + [_SIGNAL_BOUNDS, _NOISE_BOUNDS]
    found = minimize(
        _loss,
        begin,
        args=(differences, values[chosen]),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": _STEPS},
    )
    return Hyperparameters(tuple(float(each) for each in found.x[:count]), float(found.x[-2]), float(found.x[-1]))


def _loss(given: np.ndarray, differences: np.ndarray, values: np.ndarray) -> tuple[float, np.ndarray]:
    """The negative logarithm of the marginal likelihood times the prior, and its gradient."""
    count = differences.shape[2]
    inverse = np.exp(-2 * given[:count])
    signal, noise = np.exp(2 * given[count]), np.exp(2 * given[count + 1])
    distance = np.sqrt(3 * np.maximum(differences @ inverse, 0.0))
    decay = np.exp(-distance)
    clean = signal * (1 + distance) * decay
    try:
        factor = cholesky(clean + (noise + _LEAST_NOISE) * np.eye(len(values)), lower=True)
    except LinAlgError:
        return 1e10, np.zeros_like(given)
    weights = cho_solve((factor, True), values)
    pull = np.outer(weights, weights) - cho_solve((factor, True), np.eye(len(values)))
    beyond = (given[:count] - np.log(_LENGTH)) / _LENGTH_SPREAD
    loss = 0.5 * values @ weights + np.log(np.diag(factor)).sum() + 0.5 * (beyond**2).sum()
    gradient = np.empty_like(given)
    by_distance = pull * (3 * signal * decay)
    gradient[:count] = -0.5 * np.tensordot(by_distance, differences, axes=([0, 1], [0, 1])) * inverse
    gradient[:count] += beyond / _LENGTH_SPREAD
    gradient[count] = -(pull * clean).sum()
    gradient[count + 1] = -noise * np.trace(pull)
    return float(loss), gradient


# Fewer shapes than this are no basis for a fit.
LEAST_SHAPES = 8
_LOWEST_FRACTION = 0.1


@dataclass(frozen=True)
class PredictedLatency:
    """A latency in seconds; `low` and `high` are the ends of the model's own interval of 95 %."""

    seconds: float
    low: float
    high: float


class LayerLatency:
    """The latency of layers with one algorithm on one device.

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
        self._coefficients = relative_nonnegative(terms, seconds)
        self._floor_s = _LOWEST_FRACTION * float(seconds.min())
        rest = np.log(seconds / self._sum_of_terms(shapes))
        self._process = GaussianProcess(matrix_of_features(shapes, algorithm, device), rest, hyperparameters)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters of the Gaussian process."""
        return self._process.hyperparameters

    def predict(self, shapes: Sequence[ConvShape]) -> list[PredictedLatency]:
        """The latency of each shape."""
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
    """Mean seconds by shape over layers where `algorithm` ran; `guess`: where it was requested or fallen back to."""
    found: dict[ConvShape, list[float]] = {}
    for layer in layers:
        if layer.runs == algorithm or (algorithm == "guess" and (layer.asked == "guess" or layer.fell_back)):
            found.setdefault(layer.shape, []).append(layer.latency_s)
    return {shape: float(np.mean(seconds)) for shape, seconds in found.items()}
