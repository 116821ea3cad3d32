"""In: folds; out: how far predictions are from what was measured, against a roofline and a line. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from experiments.performance_prediction.convolution import AlgorithmName
from experiments.performance_prediction.device_predictor import DevicePredictor, PredictedInference, fit_device
from experiments.performance_prediction.layer_latency import seconds_by_shape
from experiments.performance_prediction.network_operations import network_operations
from experiments.performance_prediction.prediction_baselines import LinearLatency, Roofline
from experiments.performance_prediction.prediction_folds import Fold
from experiments.performance_prediction.prediction_tables import MeasuredInference

HIT = 0.1
OURS, ROOFLINE, LINEAR = "this model", "roofline", "linear"
LAYER, DEVICE, WHOLE, ENERGY = "layer", "network, device", "network, with host", "energy"


@dataclass(frozen=True)
class PredictedAndMeasured:
    """One predicted figure beside the measured one, in seconds or joules.

    Attributes:
        fold_kind, fold: which fold left it out.
        method, level: of the names above.
        layer: None for a whole network.
    """

    fold_kind: str
    fold: str
    method: str
    level: str
    model: str
    algorithm: AlgorithmName
    input_size: int
    layer: str | None
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class PredictionScore:
    """Over n comparisons.

    Attributes:
        mape: mean of the relative errors.
        hit_rate: share of them within 10 %.
        bias: mean of predicted / measured - 1.
    """

    n: int
    mape: float
    hit_rate: float
    bias: float


@dataclass(frozen=True)
class FoldResult:
    """What a fold gave.

    Attributes:
        predictor: fitted to its training part.
        layers_known: share of the layers left out whose shape was in the training part, at another size.
        layers_covered: share of them that lie within the interval of 95 % that was predicted.
        support_wrong: layers for which another algorithm was expected to run than did.
    """

    fold: Fold
    predictor: DevicePredictor
    comparisons: tuple[PredictedAndMeasured, ...]
    layers_known: float
    layers_covered: float
    support_wrong: int


def score(comparisons: Iterable[PredictedAndMeasured]) -> PredictionScore | None:
    """None of nothing."""
    ratios = np.array([each.predicted / each.measured - 1 for each in comparisons])
    if not len(ratios):
        return None
    errors = np.abs(ratios)
    return PredictionScore(len(ratios), float(errors.mean()), float((errors <= HIT).mean()), float(ratios.mean()))


class _Figures(NamedTuple):
    """Seconds that one method says of an inference."""

    layers: Sequence[float]
    device_s: float
    whole_s: float


def validate(fold: Fold) -> FoldResult:
    """Fits to the training part alone and predicts the rest of it."""
    predictor = fit_device(fold.train, fold.left_out)
    trained = [each for one in fold.train.inferences for each in one.layers if each.shape not in fold.left_out]
    linear = LinearLatency({name: seconds_by_shape(trained, name) for name in predictor.latencies})
    roofline = Roofline(predictor.device, predictor.precision)
    known = {layer.shape for layer in trained}
    found: list[PredictedAndMeasured] = []
    wrong = layers = seen = covered = 0
    for inference in fold.test.inferences:
        if inference.asked not in predictor.algorithms:
            continue
        ours = predictor.predict(inference.model, inference.asked, inference.input_size, inference.batch_size)
        pairs = list(zip(ours.layers, inference.layers, strict=True))
        wrong += sum((mine.runs != mine.asked) is not its.fell_back for mine, its in pairs)
        layers += len(pairs)
        seen += sum(its.shape in known for _, its in pairs)
        covered += sum(mine.latency.low <= its.latency_s <= mine.latency.high for mine, its in pairs)
        for method, figures in _figures(ours, linear, roofline).items():
            found += _compared(fold, method, inference, figures)
    found += _energies(fold, predictor)
    count = max(layers, 1)
    return FoldResult(fold, predictor, tuple(found), seen / count, covered / count, wrong)


def _figures(ours: PredictedInference, linear: LinearLatency, roofline: Roofline) -> dict[str, _Figures]:
    """Figures by method; the line has this model's rest and host, the roofline nothing that was fitted."""
    in_line = [linear.layer_s(each.shape, each.runs) for each in ours.layers]
    line_s = sum(in_line) + ours.rest_s
    found = {
        OURS: _Figures([each.latency.seconds for each in ours.layers], ours.device_s, ours.whole_s),
        LINEAR: _Figures(in_line, line_s, max(line_s, ours.host_s or 0.0)),
    }
    if roofline.reason is None:
        in_roof = [roofline.layer_s(each.shape) for each in ours.layers]
        roof_s = sum(in_roof) + roofline.rest_s(network_operations(ours.model, ours.input_size, ours.batch_size))
        found[ROOFLINE] = _Figures(in_roof, roof_s, roof_s)
    return found


def _compared(fold: Fold, method: str, inference: MeasuredInference, figures: _Figures) -> list[PredictedAndMeasured]:
    def comparison(level: str, layer: str | None, predicted: float, measured: float) -> PredictedAndMeasured:
        known = (inference.model, inference.asked, inference.input_size)
        return PredictedAndMeasured(fold.kind, fold.name, method, level, *known, layer, predicted, measured)

    layers = zip(inference.layers, figures.layers, strict=True)
    return [
        *(comparison(LAYER, its.layer, predicted, its.latency_s) for its, predicted in layers),
        comparison(DEVICE, None, figures.device_s, inference.device_s),
        comparison(WHOLE, None, figures.whole_s, inference.whole_s),
    ]


def _energies(fold: Fold, predictor: DevicePredictor) -> list[PredictedAndMeasured]:
    """Predicted from predicted times."""
    found = []
    for each in fold.test.energies:
        if predictor.energy is None or each.energy_j is None or each.asked not in predictor.algorithms:
            continue
        ours = predictor.predict(each.model, each.asked, each.input_size, each.batch_size)
        if ours.energy_j is None:
            continue
        known = (each.model, each.asked, each.input_size)
        found.append(
            PredictedAndMeasured(fold.kind, fold.name, OURS, ENERGY, *known, None, ours.energy_j, each.energy_j)
        )
    return found
