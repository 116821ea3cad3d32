"""In: predictions beside measurements, over all folds; out: how far apart, by kind of fold and algorithm. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.performance_prediction.convolution import ALGORITHMS
from experiments.performance_prediction.prediction_folds import MODEL
from experiments.performance_prediction.prediction_validation import (
    DEVICE,
    ENERGY,
    LAYER,
    LINEAR,
    OURS,
    ROOFLINE,
    WHOLE,
    FoldResult,
    PredictedAndMeasured,
    score,
)

ALL = "all"
LEVELS = (LAYER, DEVICE, WHOLE, ENERGY)
METHODS = (OURS, ROOFLINE, LINEAR)


@dataclass(frozen=True)
class ScoreRow:
    """One score.

    Attributes:
        fold: the model or the sizes left out, or `all` folds of the kind together.
        algorithm: that was requested, or `all`.
        n, mape, hit_rate, bias: as in `Score`.
    """

    fold_kind: str
    fold: str
    method: str
    level: str
    algorithm: str
    n: int
    mape: float
    hit_rate: float
    bias: float


def score_rows(results: Sequence[FoldResult]) -> list[ScoreRow]:
    """Scores by kind of fold, level and method: of each algorithm and of all; of each model left out, of all
    algorithms.
    """
    found = []
    for kind in dict.fromkeys(result.fold.kind for result in results):
        of_kind = [result for result in results if result.fold.kind == kind]
        comparisons = [each for result in of_kind for each in result.comparisons]
        for algorithm in (*ALGORITHMS, ALL):
            found += _rows(kind, ALL, algorithm, [each for each in comparisons if algorithm in (ALL, each.algorithm)])
        if kind == MODEL:
            for result in of_kind:
                found += _rows(kind, result.fold.name, ALL, result.comparisons)
    return found


def score_of(rows: Sequence[ScoreRow], kind: str, level: str, algorithm: str = ALL) -> ScoreRow | None:
    """This model's, over all folds of a kind; None where there is none."""
    wanted = (kind, ALL, OURS, level, algorithm)
    for row in rows:
        if (row.fold_kind, row.fold, row.method, row.level, row.algorithm) == wanted:
            return row
    return None


def _rows(kind: str, fold: str, algorithm: str, comparisons: Sequence[PredictedAndMeasured]) -> list[ScoreRow]:
    found = []
    for level in LEVELS:
        for method in METHODS:
            its = score(each for each in comparisons if each.level == level and each.method == method)
            if its is not None:
                found.append(ScoreRow(kind, fold, method, level, algorithm, its.n, its.mape, its.hit_rate, its.bias))
    return found
