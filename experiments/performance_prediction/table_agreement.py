"""In: measured layers; out: the tables whose layers took far longer than the same work in other tables. Pure.

A convolution of one shape by one algorithm stands in several tables: where it was requested, and where others fell back
to it. Such times should agree; where they do not, what stood around the layers disturbed them, and a fit to their mean
is of neither.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from experiments.performance_prediction.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction_tables import MeasuredLayer

# Times the median of the other tables.
FAR_LONGER = 2.0
# Of the shapes that a table shares with others.
LARGE_FRACTION = 0.1


@dataclass(frozen=True)
class Disagreement:
    """Tables of one algorithm against all others.

    Attributes:
        asked: the algorithm that was requested.
        far_longer: shapes whose layers took more than `FAR_LONGER` times the others' median.
        shared: shapes that other tables have too, run by the same algorithm.
        worst: the largest of the ratios.
    """

    asked: AlgorithmName
    far_longer: int
    shared: int
    worst: float


def disagreements(layers: Iterable[MeasuredLayer]) -> list[Disagreement]:
    """Algorithms in whose tables more than `LARGE_FRACTION` of the shared shapes took far longer."""
    seconds: dict[tuple[ConvShape, AlgorithmName], dict[AlgorithmName, list[float]]] = {}
    for layer in layers:
        seconds.setdefault((layer.shape, layer.runs), {}).setdefault(layer.asked, []).append(layer.latency_s)
    ratios: dict[AlgorithmName, list[float]] = {}
    for by_requested in seconds.values():
        means = {requested: float(np.mean(each)) for requested, each in by_requested.items()}
        for requested, mean in means.items():
            others = [other for name, other in means.items() if name != requested]
            if others:
                ratios.setdefault(requested, []).append(mean / float(np.median(others)))
    found = []
    for requested, each in ratios.items():
        far_longer = sum(ratio > FAR_LONGER for ratio in each)
        if far_longer > LARGE_FRACTION * len(each):
            found.append(Disagreement(requested, far_longer, len(each), max(each)))
    return found


def agreement_lines(layers: Iterable[MeasuredLayer]) -> list[str]:
    """A line for each algorithm whose tables disagree with the others."""
    return [
        f"caution: in the tables of {each.asked}, {each.far_longer} of {each.shared} shapes took over "
        f"{FAR_LONGER:g} times as long as the same algorithm did elsewhere (up to {each.worst:.0f} times); something "
        "disturbed one of them: measure again, or leave tables out"
        for each in disagreements(layers)
    ]
