"""How far predictions are off, relative to what was measured."""

import math
from dataclasses import dataclass

import numpy as np

HIT = 0.1


@dataclass(frozen=True)
class PredictionScore:
    """Errors of n predictions, as fractions, not percent."""

    n: int
    mape: float  #: mean of |predicted / measured - 1|
    hit_rate: float  #: fraction of predictions within 10 %
    bias: float  #: mean of predicted / measured - 1


def mean_of(values: np.ndarray) -> float | None:
    """The mean; None of nothing."""
    return float(values.mean()) if len(values) else None


def deviations(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Predicted / measured - 1 of the samples that have both, and a measured value above 0."""
    has = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    return np.asarray(predicted[has] / measured[has] - 1)


def relative_error(predicted: np.ndarray | None, measured: np.ndarray) -> float:
    """Mean size of the deviations; infinite where there are none."""
    found = np.zeros(0) if predicted is None else deviations(predicted, measured)
    return float(np.abs(found).mean()) if len(found) else math.inf


def score(predicted: np.ndarray, measured: np.ndarray) -> PredictionScore | None:
    """None of nothing."""
    found = deviations(predicted, measured)
    if not len(found):
        return None
    errors = np.abs(found)
    return PredictionScore(len(found), float(errors.mean()), float((errors <= HIT).mean()), float(found.mean()))
