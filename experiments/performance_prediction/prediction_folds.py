"""In: measurements of one device; out: how to part them so that what is predicted was never seen. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.convolution import ConvShape
from experiments.performance_prediction.prediction_tables import Measurements

INNER_SIZES, END_SIZES, MODEL = "sizes between", "sizes at the ends", "model"
# Of sizes in ascending order every third is left out, from the second on.
_EVERY, _FIRST = 3, 1


@dataclass(frozen=True)
class Fold:
    """What is fitted to, and what is predicted.

    Attributes:
        kind: one of the three names above.
        name: the sizes or the model left out.
        train: without any inference of `test`.
        test: what was left out.
        left_out: shapes that the fit may not see either: those of a model left out, in whatever other model.
    """

    kind: str
    name: str
    train: Measurements
    test: Measurements
    left_out: frozenset[ConvShape] = frozenset()


def folds(measured: Measurements, inner_sizes: Sequence[int] = ()) -> list[Fold]:
    """Sizes within the range, its two ends, and each model in turn; those for which enough is left.

    Args:
        inner_sizes: which sizes to leave out in the first; () for every third.

    Raises:
        ConfigurationError: an inner size that was not measured.
    """
    sizes = sorted({each.input_size for each in measured.inferences})
    unknown = sorted(set(inner_sizes) - set(sizes))
    if unknown:
        raise ConfigurationError(
            f"size {', '.join(map(str, unknown))} cannot be held out: it was not measured; measured are "
            f"{', '.join(map(str, sizes))}"
        )
    found = []
    if len(sizes) >= _EVERY:
        inner = sorted(set(inner_sizes)) or sizes[_FIRST:-1:_EVERY]
        found.append(_without_sizes(INNER_SIZES, measured, inner))
    if len(sizes) > _EVERY:
        found.append(_without_sizes(END_SIZES, measured, [sizes[0], sizes[-1]]))
    models = list(dict.fromkeys(each.model for each in measured.inferences))
    if len(models) > 1:
        found += [_without_model(measured, model) for model in models]
    return found


def _without_sizes(kind: str, measured: Measurements, sizes: Sequence[int]) -> Fold:
    train, test = (
        Measurements(
            tuple(each for each in measured.inferences if (each.input_size in sizes) is out),
            tuple(each for each in measured.energies if (each.input_size in sizes) is out),
        )
        for out in (False, True)
    )
    return Fold(kind, ", ".join(map(str, sizes)), train, test)


def _without_model(measured: Measurements, model: str) -> Fold:
    train, test = (
        Measurements(
            tuple(each for each in measured.inferences if (each.model == model) is out),
            tuple(each for each in measured.energies if (each.model == model) is out),
        )
        for out in (False, True)
    )
    shapes = frozenset(layer.shape for each in test.inferences for layer in each.layers)
    return Fold(MODEL, model, train, test, shapes)
