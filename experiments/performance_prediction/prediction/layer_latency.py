"""The latency of any layer with one algorithm on one device, fitted to measured layers.

A classifier says which kernel runs. Its time is a sum of the algorithm's terms with coefficients of 0 and more, in
relative least squares, and a Gaussian process for the logarithm of what is left: near measured shapes the process
follows them, far from them only the sum counts.
"""

from collections import Counter
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
    from sklearn.ensemble import ExtraTreesClassifier
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
# The name of rare kernels, and of those that are not known.
ANY_KERNEL = ""
_TREES = 100
# Parts in which layers are left out for the interval.
_LEFT_OUT = 5
_LOWEST_FRACTION = 0.1


@dataclass(frozen=True)
class PredictedLatency:
    """A latency in seconds; `low` and `high` are the ends of its conformal interval of 95 %."""

    seconds: float
    low: float
    high: float


class _Regression:
    """A sum of terms times a Gaussian process, fitted to seconds by shape; hyperparameters None: found here."""

    def __init__(
        self,
        algorithm: AlgorithmName,
        multiprocessors: int,
        measured: Mapping[ConvShape, float],
        hyperparameters: Hyperparameters | None,
    ) -> None:
        self._algorithm, self._multiprocessors = algorithm, multiprocessors
        shapes, seconds = list(measured), np.array(list(measured.values()))
        terms = matrix_of_terms(shapes, algorithm, multiprocessors)
        self._coefficients = relative_nonnegative(terms, seconds)
        self._floor_s = _LOWEST_FRACTION * float(seconds.min())
        rest = np.log(seconds / self._sum_of_terms(shapes))
        features = matrix_of_features(shapes, algorithm, multiprocessors)
        spread = features.std(axis=0)
        self._centre, self._scale = features.mean(axis=0), np.where(spread > 1e-9, spread, np.inf)
        points = self._points(shapes)
        self.hyperparameters = hyperparameters or likeliest(points, rest)
        self._process = gaussian_process(points, rest, self.hyperparameters)

    def log_seconds(self, shapes: Sequence[ConvShape]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [N] of the logarithm of seconds."""
        mean, spread = self._process.predict(self._points(shapes), return_std=True)
        return np.log(self._sum_of_terms(shapes)) + mean, spread

    def _points(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        """The features [N, F] in units of their spread over the measured shapes; 0 where they had none."""
        return (matrix_of_features(shapes, self._algorithm, self._multiprocessors) - self._centre) / self._scale

    def _sum_of_terms(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        terms = matrix_of_terms(shapes, self._algorithm, self._multiprocessors)
        return np.maximum(terms @ self._coefficients, self._floor_s)


class LayerLatency:
    """The latency of layers with one algorithm on one device: which kernel runs, then its time.

    A forest gives each kernel's probability for a shape. Each kernel that ran in `LEAST_SHAPES` shapes has a regression
    of its own; rarer ones, and layers whose kernels are not known, have one that is fitted to all shapes. The
    logarithms of their times are averaged with the probabilities.

    Args:
        multiprocessors: of the device.
        measured: seconds by shape, at least `LEAST_SHAPES`.
        kernels: what ran, by shape; {} where it is not known, as on a CPU.
        hyperparameters: of the Gaussian process by kernel, `ANY_KERNEL` for all shapes; None to find them.
        interval: ends of the interval of 95 % in units of the process's spread of the logarithm; None to find them.
    """

    def __init__(
        self,
        algorithm: AlgorithmName,
        multiprocessors: int,
        measured: Mapping[ConvShape, float],
        kernels: Mapping[ConvShape, str] | None = None,
        hyperparameters: Mapping[str, Hyperparameters] | None = None,
        interval: tuple[float, float] | None = None,
    ) -> None:
        self.algorithm, self.multiprocessors, self.measured = algorithm, multiprocessors, dict(measured)
        self.kernels = {shape: name for shape, name in (kernels or {}).items() if shape in measured}
        counts = Counter(self.kernels.values())
        #: of each measured shape, its kernel or `ANY_KERNEL`
        self.labels = [
            name if name is not None and counts[name] >= LEAST_SHAPES else ANY_KERNEL
            for name in map(self.kernels.get, measured)
        ]
        known = hyperparameters or {}
        self._regressions: dict[str, _Regression] = {}
        for name in dict.fromkeys(self.labels):
            own = {
                shape: seconds
                for label, (shape, seconds) in zip(self.labels, measured.items(), strict=True)
                if name in (ANY_KERNEL, label)
            }
            self._regressions[name] = _Regression(algorithm, multiprocessors, own, known.get(name))
        self._forest = self._classifier() if len(self._regressions) > 1 else None
        #: mean |log measured - log predicted| of layers left out; None where `interval` was given
        self.error_left_out: float | None = None
        self.interval = interval or self._conformal_interval()

    @classmethod
    def chosen(
        cls,
        algorithm: AlgorithmName,
        multiprocessors: int,
        measured: Mapping[ConvShape, float],
        kernels: Mapping[ConvShape, str],
    ) -> "LayerLatency":
        """By kernel, or one regression for all shapes where that is better at layers left out with all their sizes."""
        by_kernel = cls(algorithm, multiprocessors, measured, kernels)
        if by_kernel._forest is None:
            return by_kernel
        one = cls(algorithm, multiprocessors, measured)
        assert one.error_left_out is not None and by_kernel.error_left_out is not None
        return one if one.error_left_out <= by_kernel.error_left_out else by_kernel

    @property
    def hyperparameters(self) -> dict[str, Hyperparameters]:
        """The hyperparameters by kernel."""
        return {name: each.hyperparameters for name, each in self._regressions.items()}

    def likeliest_kernels(self, shapes: Sequence[ConvShape]) -> list[str]:
        """The kernel of each shape that is likeliest to run; `ANY_KERNEL` for one of the rare."""
        names = list(self._regressions)
        return [names[place] for place in self._probabilities(shapes).argmax(axis=1)]

    def predict(self, shapes: Sequence[ConvShape]) -> list[PredictedLatency]:
        """The latency of each shape."""
        if not shapes:
            return []
        shares = self._probabilities(shapes)
        found = [each.log_seconds(shapes) for each in self._regressions.values()]
        means, spreads = (np.stack(each, axis=1) for each in zip(*found, strict=True))
        mean = (shares * means).sum(axis=1)
        # The variance of a mixture.
        spread = np.sqrt((shares * (spreads**2 + (means - mean[:, None]) ** 2)).sum(axis=1))
        seconds = np.exp(mean)
        ends = zip(seconds, *(seconds * np.exp(end * spread) for end in self.interval), strict=True)
        return [PredictedLatency(float(middle), float(low), float(high)) for middle, low, high in ends]

    def _classifier(self) -> "ExtraTreesClassifier":
        from sklearn.ensemble import ExtraTreesClassifier

        forest = ExtraTreesClassifier(_TREES, random_state=0)
        return forest.fit(self._features(list(self.measured)), self.labels)

    def _probabilities(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        """[N, kernels], in the order of the regressions."""
        if self._forest is None:
            return np.ones((len(shapes), 1))
        places = [list(self._forest.classes_).index(name) for name in self._regressions]
        return np.asarray(self._forest.predict_proba(self._features(shapes))[:, places])

    def _features(self, shapes: Sequence[ConvShape]) -> np.ndarray:
        return matrix_of_features(shapes, self.algorithm, self.multiprocessors)

    def _conformal_interval(self) -> tuple[float, float]:
        """Order statistics of (log measured - log predicted) / spread of layers left out with all of their sizes."""
        shapes, seconds = list(self.measured), np.array(list(self.measured.values()))
        layers = np.array([f"{s.in_channels} {s.out_channels} {s.kernel} {s.stride} {s.groups}" for s in shapes])
        if len(np.unique(layers)) < _LEFT_OUT:
            layers = np.arange(len(shapes)).astype(str)
        scores, errors = np.zeros(len(shapes)), np.zeros(len(shapes))
        for which in left_out_masks(layers, _LEFT_OUT):
            rest = {shapes[place]: seconds[place] for place in np.flatnonzero(~which)}
            known = self.hyperparameters
            part = LayerLatency(self.algorithm, self.multiprocessors, rest, self.kernels, known, (-1.0, 1.0))
            found = part.predict([shapes[place] for place in np.flatnonzero(which)])
            middle, high = (np.array([getattr(each, name) for each in found]) for name in ("seconds", "high"))
            errors[which] = np.log(seconds[which] / middle)
            scores[which] = errors[which] / np.log(high / middle)
        self.error_left_out = float(np.abs(errors).mean())
        return conformal_ratios(scores, CONFIDENCE)


def seconds_by_shape(layers: Iterable[MeasuredLayer], algorithm: AlgorithmName) -> dict[ConvShape, float]:
    """Mean seconds by shape over layers where `algorithm` ran; `guess`: where it was requested or fallen back to."""
    found: dict[ConvShape, list[float]] = {}
    for layer in layers:
        if _ran_as(layer, algorithm):
            found.setdefault(layer.shape, []).append(layer.latency_s)
    return {shape: float(np.mean(seconds)) for shape, seconds in found.items()}


def kernels_by_shape(layers: Iterable[MeasuredLayer], algorithm: AlgorithmName) -> dict[ConvShape, str]:
    """The kernels that ran most often by shape, over the layers of `seconds_by_shape`; without unknown ones."""
    found: dict[ConvShape, Counter[str]] = {}
    for layer in layers:
        if layer.kernels is not None and _ran_as(layer, algorithm):
            found.setdefault(layer.shape, Counter())[layer.kernels] += 1
    return {shape: counts.most_common(1)[0][0] for shape, counts in found.items()}


def _ran_as(layer: MeasuredLayer, algorithm: AlgorithmName) -> bool:
    return layer.runs == algorithm or (algorithm == "guess" and (layer.requested == "guess" or layer.fell_back))
