"""Validation of a predictor on folds of one device's measurements that it was not fitted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiment_core_utils.meters.host_facts import known_peaks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.fitting.held_out import PredictionScore, score
from experiments.fitting.regression import relative_nonnegative
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, AlgorithmName, ConvShape
from experiments.performance_prediction.prediction.layer_latency import LayerLatency
from experiments.performance_prediction.prediction.measurements import MeasuredInference, Measurements
from experiments.performance_prediction.prediction.network_predictor import (
    DevicePredictor,
    PredictedInference,
    fit_device,
)
from experiments.performance_prediction.prediction.operations import (
    FLOAT32_BYTES,
    NetworkOperations,
    network_operations,
)
from experiments.performance_prediction.prediction.work import matrix_of_features

_TREES = 50
_PRODUCTS = {"fma": "float32", "tf32": "tf32", "half": "float16"}
_ELEMENT_BYTES = {"fma": FLOAT32_BYTES, "tf32": FLOAT32_BYTES, "half": 2}


class Roofline:
    """The roofline: FLOPs / peak or bytes / bandwidth, whichever is longer, whatever the algorithm; nothing is fitted.

    The peaks are the data sheet's, and the bytes of an element are the precision's. `reason` says why there are no
    peaks: then nothing can be predicted.
    """

    def __init__(self, device: str, precision: str) -> None:
        peaks = known_peaks(device, _PRODUCTS[precision])
        self._flops_per_s, self._bytes_per_s = peaks.flops_per_s, peaks.bytes_per_s
        self._element_bytes = _ELEMENT_BYTES[precision]
        self.reason = peaks.reason

    def layer_s(self, shape: ConvShape) -> float:
        """Seconds of one layer; `reason` is None."""
        assert self._flops_per_s is not None and self._bytes_per_s is not None
        return max(shape.flops / self._flops_per_s, shape.bytes(self._element_bytes) / self._bytes_per_s)

    def rest_s(self, operations: NetworkOperations) -> float:
        """Seconds of the other operations: their bytes / bandwidth."""
        assert self._bytes_per_s is not None
        moved = (operations.other_bytes + operations.product_bytes) * self._element_bytes / FLOAT32_BYTES
        return moved / self._bytes_per_s


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


class ForestLatency:
    """A random forest over the features of a layer for each algorithm, fitted to logarithms."""

    def __init__(self, latencies: Mapping[AlgorithmName, LayerLatency]) -> None:
        # Its import takes a second, and most commands need none of it.
        from sklearn.ensemble import RandomForestRegressor

        self._latencies = latencies
        self._forests = {
            algorithm: RandomForestRegressor(_TREES, random_state=0).fit(
                matrix_of_features(list(latency.measured), algorithm, latency.multiprocessors),
                np.log(list(latency.measured.values())),
            )
            for algorithm, latency in latencies.items()
        }

    def layers_s(self, shapes: Sequence[ConvShape], runs: Sequence[AlgorithmName]) -> list[float]:
        """Seconds of layers, each with an algorithm that was measured."""
        found = np.zeros(len(shapes))
        for name in dict.fromkeys(runs):
            places = [place for place, each in enumerate(runs) if each == name]
            multiprocessors = self._latencies[name].multiprocessors
            features = matrix_of_features([shapes[place] for place in places], name, multiprocessors)
            found[places] = np.exp(self._forests[name].predict(features))
        return found.tolist()


def _columns(shapes: Sequence[ConvShape]) -> np.ndarray:
    return np.array([[1.0, shape.flops, shape.bytes(FLOAT32_BYTES)] for shape in shapes], dtype=np.float64)


INNER_SIZES, END_SIZES, MODEL = "sizes between", "sizes at the ends", "model"
# Of sizes in ascending order every third is left out, from the second on.
_EVERY, _FIRST = 3, 1


@dataclass(frozen=True)
class Fold:
    """The measurements that are fitted to, and those that are predicted."""

    kind: str  #: one of the three names above
    name: str  #: the sizes or the model left out
    train: Measurements  #: without any inference of `test`
    test: Measurements  #: what was left out
    #: shapes that the fit may not see either: those of a model left out, in whatever other model
    left_out: frozenset[ConvShape] = frozenset()


def folds(measured: Measurements, inner_sizes: Sequence[int] = ()) -> list[Fold]:
    """Folds by sizes within the range, its two ends, and each model in turn; those for which enough is left.

    Args:
        inner_sizes: which sizes to leave out in the first; () for every third.

    Raises:
        ConfigurationError: an inner size that was not measured.
    """
    sizes = sorted({network.input_size for network in measured.networks})
    unknown = sorted(set(inner_sizes) - set(sizes))
    if unknown:
        raise ConfigurationError(
            f"size {', '.join(map(str, unknown))} cannot be held out: it was not measured; measured are "
            f"{', '.join(map(str, sizes))}"
        )
    found = []
    if len(sizes) >= _EVERY:
        inner = sorted(set(inner_sizes)) or sizes[_FIRST:-1:_EVERY]
        found.append(_fold(INNER_SIZES, measured, inner))
    if len(sizes) > _EVERY:
        found.append(_fold(END_SIZES, measured, [sizes[0], sizes[-1]]))
    models = list(dict.fromkeys(each.model for each in measured.networks))
    if len(models) > 1:
        found += [_fold(MODEL, measured, [model]) for model in models]
    return found


def _fold(kind: str, measured: Measurements, left_out: Sequence[int | str]) -> Fold:
    """Without some sizes, or without a model and the shapes of its layers; sets of layers are never predicted."""

    def is_left_out(each: MeasuredInference) -> bool:
        return (each.model if kind == MODEL else each.input_size) in left_out

    train, test = (
        Measurements(
            *(tuple(one for one in each if is_left_out(one) is wanted)
              for each in (measured.inferences, measured.energies))
        )
        for wanted in (False, True)
    )  # fmt: skip
    test = Measurements(test.networks, test.energies)
    hidden = test.inferences if kind == MODEL else ()
    shapes = frozenset(layer.shape for each in hidden for layer in each.layers)
    return Fold(kind, ", ".join(map(str, left_out)), train, test, shapes)


OURS, FOREST, LINEAR, ROOFLINE = "this model", "forest", "linear", "roofline"
LAYER, DEVICE, WHOLE, ENERGY = "layer", "network, device", "network, with host", "energy"


@dataclass(frozen=True)
class PredictedAndMeasured:
    """A predicted figure beside the measured one, in seconds or joules."""

    #: fold_kind, fold: which fold left it out
    fold_kind: str
    fold: str
    #: method, level: of the names above
    method: str
    level: str
    model: str
    algorithm: AlgorithmName
    input_size: int
    layer: str | None  #: None for a whole network
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error |predicted - measured| / measured."""
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class FoldResult:
    """The results of a fold."""

    fold: Fold
    predictor: DevicePredictor  #: fitted to its training part
    comparisons: tuple[PredictedAndMeasured, ...]
    layers_known: float  #: fraction of the layers left out whose shape was in the training part, at another size
    layers_covered: float  #: fraction of them within the interval of 95 % that was predicted
    support_wrong: int  #: layers for which another algorithm was expected to run than did


class _Figures(NamedTuple):
    """The seconds that one method predicts for an inference."""

    layers: Sequence[float]
    device_s: float
    whole_s: float


def validate(fold: Fold) -> FoldResult:
    """The result of fitting to the training part alone and predicting the rest."""
    predictor = fit_device(fold.train, fold.left_out)
    baselines = _Baselines.fitted(predictor)
    known = {shape for latency in predictor.latencies.values() for shape in latency.measured}
    found: list[PredictedAndMeasured] = []
    wrong = layers = seen = covered = 0
    for inference in fold.test.inferences:
        if inference.requested not in predictor.algorithms:
            continue
        ours = predictor.predict(inference.model, inference.requested, inference.input_size, inference.batch_size)
        pairs = list(zip(ours.layers, inference.layers, strict=True))
        wrong += sum((mine.runs != mine.requested) is not its.fell_back for mine, its in pairs)
        layers += len(pairs)
        seen += sum(its.shape in known for _, its in pairs)
        covered += sum(mine.latency.low <= its.latency_s <= mine.latency.high for mine, its in pairs)
        for method, figures in baselines.figures(ours).items():
            found += _compared(fold, method, inference, figures)
    found += _energies(fold, predictor)
    count = max(layers, 1)
    return FoldResult(fold, predictor, tuple(found), seen / count, covered / count, wrong)


class _Baselines(NamedTuple):
    """What else predicts the same layers; all but the roofline have this model's rest and host."""

    forest: ForestLatency
    linear: LinearLatency
    roofline: Roofline

    @classmethod
    def fitted(cls, predictor: DevicePredictor) -> "_Baselines":
        """The baselines, fitted to the layers that the predictor was fitted to."""
        latencies = predictor.latencies
        return cls(
            ForestLatency(latencies),
            LinearLatency({name: each.measured for name, each in latencies.items()}),
            Roofline(predictor.device, predictor.precision),
        )

    def figures(self, ours: PredictedInference) -> dict[str, _Figures]:
        """Predicted seconds by method."""
        shapes, runs = [layer.shape for layer in ours.layers], [each.runs for each in ours.layers]
        layers = {
            FOREST: self.forest.layers_s(shapes, runs),
            LINEAR: [self.linear.layer_s(shape, name) for shape, name in zip(shapes, runs, strict=True)],
        }
        found = {OURS: _Figures([each.latency.seconds for each in ours.layers], ours.device_s, ours.whole_s)}
        for method, seconds in layers.items():
            device_s = sum(seconds) + ours.rest_s
            found[method] = _Figures(seconds, device_s, max(device_s, ours.host_s or 0.0))
        if self.roofline.reason is None:
            in_roof = [self.roofline.layer_s(shape) for shape in shapes]
            operations = network_operations(ours.model, ours.input_size, ours.batch_size)
            roof_s = sum(in_roof) + self.roofline.rest_s(operations)
            found[ROOFLINE] = _Figures(in_roof, roof_s, roof_s)
        return found


def _compared(fold: Fold, method: str, inference: MeasuredInference, figures: _Figures) -> list[PredictedAndMeasured]:
    def comparison(level: str, layer: str | None, predicted: float, measured: float) -> PredictedAndMeasured:
        known = (inference.model, inference.requested, inference.input_size)
        return PredictedAndMeasured(fold.kind, fold.name, method, level, *known, layer, predicted, measured)

    layers = zip(inference.layers, figures.layers, strict=True)
    return [
        *(comparison(LAYER, its.layer, predicted, its.latency_s) for its, predicted in layers),
        comparison(DEVICE, None, figures.device_s, inference.device_s),
        comparison(WHOLE, None, figures.whole_s, inference.whole_s),
    ]


def _energies(fold: Fold, predictor: DevicePredictor) -> list[PredictedAndMeasured]:
    """Energies predicted from predicted times."""
    found = []
    for each in fold.test.energies:
        if predictor.energy is None or each.energy_j is None or each.requested not in predictor.algorithms:
            continue
        ours = predictor.predict(each.model, each.requested, each.input_size, each.batch_size)
        if ours.energy_j is None:
            continue
        known = (each.model, each.requested, each.input_size)
        found.append(
            PredictedAndMeasured(fold.kind, fold.name, OURS, ENERGY, *known, None, ours.energy_j, each.energy_j)
        )
    return found


ALL = "all"
LEVELS = (LAYER, DEVICE, WHOLE, ENERGY)
METHODS = (OURS, FOREST, LINEAR, ROOFLINE)


@dataclass(frozen=True)
class ScoreRow(PredictionScore):
    """A score with its kind of fold, level and method."""

    fold_kind: str
    fold: str  #: the model or the sizes left out, or `all` folds of the kind together
    method: str
    level: str
    algorithm: str  #: that was requested, or `all`


def score_rows(results: Sequence[FoldResult]) -> list[ScoreRow]:
    """Scores by kind of fold, level and method: of each algorithm, of all, and of all for each model left out."""
    found = []
    for kind in dict.fromkeys(result.fold.kind for result in results):
        of_kind = [result for result in results if result.fold.kind == kind]
        comparisons = [comparison for result in of_kind for comparison in result.comparisons]
        for algorithm in (*ALGORITHMS, ALL):
            found += _rows(kind, ALL, algorithm, [each for each in comparisons if algorithm in (ALL, each.algorithm)])
        if kind == MODEL:
            for result in of_kind:
                found += _rows(kind, result.fold.name, ALL, result.comparisons)
    return found


def score_of(rows: Sequence[ScoreRow], kind: str, level: str, algorithm: str = ALL) -> ScoreRow | None:
    """The score of this model over all folds of a kind; None where there is none."""
    wanted = (kind, ALL, OURS, level, algorithm)
    for row in rows:
        if (row.fold_kind, row.fold, row.method, row.level, row.algorithm) == wanted:
            return row
    return None


def _rows(kind: str, fold: str, algorithm: str, comparisons: Sequence[PredictedAndMeasured]) -> list[ScoreRow]:
    found = []
    for level in LEVELS:
        for method in METHODS:
            own = [each for each in comparisons if each.level == level and each.method == method]
            its = score(np.array([each.predicted for each in own]), np.array([each.measured for each in own]))
            if its is not None:
                found.append(
                    ScoreRow(**vars(its), fold_kind=kind, fold=fold, method=method, level=level, algorithm=algorithm)
                )
    return found
