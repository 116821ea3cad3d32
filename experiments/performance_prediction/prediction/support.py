"""Rules of whether an algorithm is granted for a shape, from layers in which it was granted or refused.

Layers of one kernel, stride and dilation (groups or none) are a class. A class that was always granted, or always
refused, is so throughout; in a mixed one the side of the padded input decides, as FFT's limits do, and where even that
does not separate them, the nearest measured layer of the class. A class that was never measured is not granted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiment_core_utils.primitives.texts import all_of
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape, Pair
from experiments.performance_prediction.prediction.measurements import MeasuredLayer

_Class = tuple[Pair, Pair, Pair, bool]


@dataclass(frozen=True)
class RequestedShape:
    """A shape that was requested; `refusal` is None where it was granted."""

    shape: ConvShape
    refusal: str | None


@dataclass(frozen=True)
class Support:
    """Whether an algorithm is expected to be granted, and the evidence for it in words."""

    granted: bool
    basis: str


class SupportRules:
    """The rules of support of one algorithm.

    Args:
        observations: each shape once; nothing else is known.
    """

    def __init__(self, algorithm: AlgorithmName, observations: Sequence[RequestedShape]) -> None:
        self.algorithm = algorithm
        self.observations = tuple(observations)
        self._known = {each.shape: each for each in observations}
        self._classes: dict[_Class, list[RequestedShape]] = {}
        for each in observations:
            self._classes.setdefault(_class_of(each.shape), []).append(each)

    def of(self, shape: ConvShape) -> Support:
        """The support that the rules expect for a shape."""
        if shape in self._known:
            return _as(self._known[shape], "measured in this very shape")
        alike = self._classes.get(_class_of(shape), [])
        if not alike:
            return Support(False, f"no layer with {_words(shape)} was requested {self.algorithm}")
        granted = [each for each in alike if each.refusal is None]
        if len(granted) in (0, len(alike)):
            return _as(alike[0], f"{all_of(len(alike), 'measured layer')} with {_words(shape)}")
        refused = [each for each in alike if each.refusal is not None]
        largest, smallest = max(map(_side, granted)), min(map(_side, refused))
        if largest < smallest:
            side = max(shape.padded_size)
            between = largest < side < smallest
            basis = f"with {_words(shape)} granted up to a padded side of {largest}, refused from {smallest}"
            return Support(side <= largest, f"{basis}; between is not known" if between else basis)
        nearest = min(alike, key=lambda each: _distance(each.shape, shape))
        return _as(nearest, f"the nearest measured layer with {_words(shape)}: {nearest.shape}")


def observed(layers: Iterable[MeasuredLayer], algorithm: AlgorithmName) -> list[RequestedShape]:
    """The shapes that the tables have of an algorithm, each once."""
    found: dict[ConvShape, RequestedShape] = {}
    for layer in layers:
        if layer.requested == algorithm:
            found.setdefault(layer.shape, RequestedShape(layer.shape, layer.refusal if layer.fell_back else None))
    return list(found.values())


def _as(observation: RequestedShape, basis: str) -> Support:
    return Support(
        observation.refusal is None, basis if observation.refusal is None else f"{basis}: {observation.refusal}"
    )


def _class_of(shape: ConvShape) -> _Class:
    return shape.kernel, shape.stride, shape.dilation, shape.groups > 1


def _words(shape: ConvShape) -> str:
    kernel, stride = (f"{first}x{second}" for first, second in (shape.kernel, shape.stride))
    return f"kernel {kernel} and stride {stride}"


def _side(observation: RequestedShape) -> int:
    return max(observation.shape.padded_size)


def _distance(one: ConvShape, other: ConvShape) -> float:
    def place(shape: ConvShape) -> tuple[float, ...]:
        sizes = (max(shape.padded_size), shape.in_channels, shape.out_channels, shape.batch)
        return tuple(math.log2(size) for size in sizes)

    return math.dist(place(one), place(other))
