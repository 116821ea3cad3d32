"""The latency of any layer with one algorithm on one device, fitted to measured layers.

It is a sum of the algorithm's terms with coefficients of 0 and more, in relative least squares, and a Gaussian process
for the logarithm of what is left: near measured shapes the process follows them, far from them only the sum counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import minimize

from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiments.fitting.held_out import left_out_masks
from experiments.fitting.intervals import conformal_ratios
from experiments.fitting.regression import relative_nonnegative
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction.measurements import MeasuredLayer
from experiments.performance_prediction.prediction.work import matrix_of_features, matrix_of_terms

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

# Of the prior on a length, in units of the feature's standard deviation: median, and spread of the logarithm.
_LENGTH, _LENGTH_SPREAD = 3.0, 1.5
# Between these natural logarithms the hyperparameters are searched.
_LENGTHS, _SIGNAL_VARIANCES, _NOISE_VARIANCES = (-2.0, 4.0), (-8.0, 4.0), (-11.0, 0.0)
_LEAST_NOISE = 1e-6
# Points that the lengths are found from, drawn with a fixed seed, and steps of the search.
_POINTS, _STEPS = 250, 25


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters as natural logarithms."""

    lengths: tuple[float, ...]  #: of each feature, in units of its standard deviation over the points
    #: signal, noise: standard deviations of the values
    signal: float
    noise: float

    @property
    def theta(self) -> np.ndarray:
        """The order and units of scikit-learn: variance of the signal, lengths, variance of the noise."""
        return np.array([2 * self.signal, *self.lengths, 2 * self.noise])


def gaussian_process(points: np.ndarray, values: np.ndarray, given: Hyperparameters) -> "GaussianProcessRegressor":
    """The process through values [N] at points [N, F]: a Matérn kernel of 3/2 with noise, and mean 0 far from them."""
    # Its import takes a second, and most commands need none of it.
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel() * Matern(np.ones(points.shape[1]), nu=1.5) + WhiteKernel()
    process = GaussianProcessRegressor(kernel.clone_with_theta(given.theta), alpha=_LEAST_NOISE, optimizer=None)
    return process.fit(points, values)


def likeliest(points: np.ndarray, values: np.ndarray) -> Hyperparameters:
    """The hyperparameters with the largest marginal likelihood times prior, found from `_POINTS` of the points."""
    chosen = np.random.default_rng(0).permutation(len(values))[:_POINTS]
    begin = Hyperparameters((float(np.log(2.0)),) * points.shape[1], float(np.log(0.3)), float(np.log(0.05)))
    process = gaussian_process(points[chosen], values[chosen], begin)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        likelihood, gradient = process.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
        beyond = (theta[1:-1] - np.log(_LENGTH)) / _LENGTH_SPREAD
        gradient[1:-1] -= beyond / _LENGTH_SPREAD
        return 0.5 * (beyond**2).sum() - likelihood, -gradient

    found = minimize(loss, begin.theta, jac=True, method="L-BFGS-B", bounds=[
        _SIGNAL_VARIANCES, *[_LENGTHS] * points.shape[1], _NOISE_VARIANCES,
    ], options={"maxiter": _STEPS}).x.tolist()  # fmt: skip
    return Hyperparameters(tuple(found[1:-1]), found[0] / 2, found[-1] / 2)


# Fewer shapes than this are no basis for a fit.
LEAST_SHAPES = 8
# Parts in which layers are left out for the interval.
_LEFT_OUT = 5
_LOWEST_FRACTION = 0.1


@dataclass(frozen=True)
class PredictedLatency:
    """A latency in seconds; `low` and `high` are the ends of its conformal interval of 95 %."""

    seconds: float
    low: float
    high: float


class LayerLatency:
    """The latency of layers with one algorithm on one device: a sum of terms times a Gaussian process.

    Args:
        multiprocessors: of the device.
        measured: seconds by shape, at least `LEAST_SHAPES`.
        hyperparameters: of the Gaussian process; None to find them.
        interval: ends of the interval of 95 % in units of the process's spread of the logarithm; None to find them.
    """

    def __init__(
        self,
        algorithm: AlgorithmName,
        multiprocessors: int,
        measured: Mapping[ConvShape, float],
        hyperparameters: Hyperparameters | None = None,
        interval: tuple[float, float] | None = None,
    ) -> None:
        self.algorithm, self.multiprocessors, self.measured = algorithm, multiprocessors, dict(measured)
        shapes, seconds = list(measured), np.array(list(measured.values()))
        self._coefficients = relative_nonnegative(matrix_of_terms(shapes, algorithm, multiprocessors), seconds)
        self._floor_s = _LOWEST_FRACTION * float(seconds.min())
        rest = np.log(seconds / self._sum_of_terms(shapes))
        features = matrix_of_features(shapes, algorithm, multiprocessors)
        spread = features.std(axis=0)
        self._centre, self._scale = features.mean(axis=0), np.where(spread > 1e-9, spread, np.inf)
        points = self._points(shapes)
        self.hyperparameters = hyperparameters or likeliest(points, rest)
        self._process = gaussian_process(points, rest, self.hyperparameters)
        self.interval = interval or self._conformal_interval()

    def predict(self, shapes: Sequence[ConvShape]) -> list[PredictedLatency]:
        """The latency of each shape."""
        if not shapes:
            return []
        mean, spread = self._process.predict(self._points(shapes), return_std=True)
        seconds = self._sum_of_terms(shapes) * np.exp(mean)
        ends = zip(seconds, *(seconds * np.exp(end * spread) for end in self.interval), strict=True)
        return [PredictedLatency(float(middle), float(low), float(high)) for middle, low, high in ends]

    def _points(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        """The features [N, F] in units of their spread over the measured shapes; 0 where they had none."""
        return (matrix_of_features(shapes, self.algorithm, self.multiprocessors) - self._centre) / self._scale

    def _sum_of_terms(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        terms = matrix_of_terms(shapes, self.algorithm, self.multiprocessors)
        return np.maximum(terms @ self._coefficients, self._floor_s)

    def _conformal_interval(self) -> tuple[float, float]:
        """Order statistics of (log measured - log predicted) / spread of layers left out with all of their sizes."""
        shapes, seconds = list(self.measured), np.array(list(self.measured.values()))
        layers = np.array([f"{s.in_channels} {s.out_channels} {s.kernel} {s.stride} {s.groups}" for s in shapes])
        if len(np.unique(layers)) < _LEFT_OUT:
            layers = np.arange(len(shapes)).astype(str)
        scores = np.zeros(len(shapes))
        for which in left_out_masks(layers, _LEFT_OUT):
            rest = {shapes[place]: seconds[place] for place in np.flatnonzero(~which)}
            part = LayerLatency(self.algorithm, self.multiprocessors, rest, self.hyperparameters, (-1.0, 1.0))
            found = part.predict([shapes[place] for place in np.flatnonzero(which)])
            middle, high = (np.array([getattr(each, name) for each in found]) for name in ("seconds", "high"))
            scores[which] = np.log(seconds[which] / middle) / np.log(high / middle)
        return conformal_ratios(scores, CONFIDENCE)


def seconds_by_shape(layers: Iterable[MeasuredLayer], algorithm: AlgorithmName) -> dict[ConvShape, float]:
    """Mean seconds by shape over layers where `algorithm` ran; `guess`: where it was requested or fallen back to."""
    found: dict[ConvShape, list[float]] = {}
    for layer in layers:
        is_guess = algorithm == "guess" and (layer.requested == "guess" or layer.fell_back)
        if layer.runs == algorithm or is_guess:
            found.setdefault(layer.shape, []).append(layer.latency_s)
    return {shape: float(np.mean(seconds)) for shape, seconds in found.items()}
