"""The cost of a network beside its convolutions: other operations, the host, and energy.

On the device an inference is the sum of its convolutions and of a rest: a constant for each other operation and for
each byte that it moves. With the host it is the longer of that and of the time in which the host issues everything: a
constant for each convolution, by algorithm, and for each other operation.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.texts import counted
from experiments.fitting.regression import relative_nonnegative
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.algorithms.support import FALLBACK
from experiments.performance_prediction.prediction.measurements import MeasuredInference, Measurements
from experiments.performance_prediction.prediction.operations import NetworkOperations

# An inference that took this much longer than its work on the device waited for the host.
_WAITED = 1.15


@dataclass(frozen=True)
class RestModel:
    """Seconds for each operation, for each byte that it moves, and for each byte of a fully connected layer."""

    per_operation_s: float
    per_byte_s: float
    per_product_byte_s: float

    def seconds(self, operations: NetworkOperations) -> float:
        """Seconds of everything but the convolutions."""
        return (
            self.per_operation_s * operations.others
            + self.per_byte_s * operations.other_bytes
            + self.per_product_byte_s * operations.product_bytes
        )


@dataclass(frozen=True)
class HostModel:
    """Seconds that the host needs to issue a convolution, by the algorithm that is requested, and another operation.

    An algorithm that never let the device wait is not in it: its convolutions count 0.
    """

    per_convolution_s: Mapping[AlgorithmName, float]
    per_operation_s: float

    def seconds(self, requested: Sequence[AlgorithmName], operations: NetworkOperations) -> float:
        """Seconds of a whole inference whose convolutions have these algorithms."""
        convolutions = sum(self.per_convolution_s.get(each, 0.0) for each in requested)
        return convolutions + self.per_operation_s * operations.others


def fit_rest(inferences: Sequence[MeasuredInference], operations: Sequence[NetworkOperations]) -> RestModel:
    """The rest model by relative non-negative least squares over the median rest of each network and size."""
    rests: dict[tuple[str, int, int], list[float]] = {}
    for inference in inferences:
        rests.setdefault(inference.network, []).append(inference.rest_s)
    of_key = {inference.network: its for inference, its in zip(inferences, operations, strict=True)}
    medians = {key: float(np.median(found)) for key, found in rests.items()}
    positive = [key for key, median in medians.items() if median > 0]
    if not positive:
        return RestModel(0.0, 0.0, 0.0)
    target = np.array([medians[key] for key in positive])
    counts = [(of.others, of.other_bytes, of.product_bytes) for of in (of_key[key] for key in positive)]
    counted = np.array(counts, dtype=np.float64)
    return RestModel(*relative_nonnegative(counted, target).tolist())


def fit_host(inferences: Sequence[MeasuredInference], operations: Sequence[NetworkOperations]) -> HostModel | None:
    """The host model by relative least squares over the inferences that waited for the host; None where none did."""
    waited = [
        (inference, its)
        for inference, its in zip(inferences, operations, strict=True)
        if inference.whole_s > _WAITED * inference.device_s
    ]
    if not waited:
        return None
    counts = [Counter(run_as(inference)) for inference, _ in waited]
    algorithms = sorted({algorithm for count in counts for algorithm in count})
    target = np.array([inference.whole_s for inference, _ in waited])
    columns = np.array(
        [
            [*(count[algorithm] for algorithm in algorithms), its.others]
            for count, (_, its) in zip(counts, waited, strict=True)
        ],
        dtype=np.float64,
    )
    found = relative_nonnegative(columns, target)
    return HostModel(dict(zip(algorithms, map(float, found[:-1]), strict=True)), float(found[-1]))


def run_as(inference: MeasuredInference) -> list[AlgorithmName]:
    """The algorithm that each convolution runs as: the requested one, or `guess` where it fell back."""
    return ["guess" if layer.fell_back else layer.requested for layer in inference.layers]


# Fewer inferences than this are no basis for a fit.
LEAST_ENERGIES = 8


@dataclass(frozen=True)
class EnergyModel:
    """A model of energy with coefficients of 0 and more, beyond those of the seconds of a whole inference."""

    whole_w: float
    rest_w: float
    #: convolution_w, per_flop_j: by algorithm that ran; one whose energy was not measured is not in them
    convolution_w: Mapping[AlgorithmName, float]
    per_flop_j: Mapping[AlgorithmName, float]
    guess: AlgorithmName | None  #: the algorithm that `guess` ran as most often; None where it was not measured
    basis: str  #: what the model was fitted to, in words

    def joules(
        self, whole_s: float, rest_s: float, convolutions: Iterable[tuple[AlgorithmName, float, ConvShape]]
    ) -> tuple[float | None, str | None]:
        """The energy of one inference in a row of them; None with the reason for an algorithm that was not measured.

        Args:
            whole_s: with the host.
            rest_s: of the other operations on the device.
            convolutions: what runs, for how long in seconds, and the shape that it computes.
        """
        total = self.whole_w * whole_s + self.rest_w * rest_s
        for name, seconds, shape in convolutions:
            runs = self.guess if name == FALLBACK else name
            if runs is None or runs not in self.convolution_w:
                return None, f"energy of {name} was not measured, of {', '.join(self.convolution_w)} it was"
            total += self.convolution_w[runs] * seconds + self.per_flop_j[runs] * shape.flops
        return total, None


def fit_energy(measured: Measurements) -> tuple[EnergyModel | None, str | None]:
    """The model by relative least squares, or None with the reason."""
    energies = measured.energies
    if len(energies) < LEAST_ENERGIES:
        return None, f"energy was measured of {counted(len(energies), 'inference')}; a fit needs {LEAST_ENERGIES}"
    algorithms = sorted({layer.runs for energy in energies for layer in energy.layers})
    target = np.array([each.energy_j for each in energies], dtype=np.float64)
    columns = np.array([_energy_columns(each, algorithms) for each in energies], dtype=np.float64)
    found = relative_nonnegative(columns, target, scaled=True).tolist()
    count = len(algorithms)
    return EnergyModel(
        whole_w=found[0],
        rest_w=found[1],
        convolution_w=dict(zip(algorithms, found[2 : 2 + count], strict=True)),
        per_flop_j=dict(zip(algorithms, found[2 + count :], strict=True)),
        guess=_choice([*measured.inferences, *energies]),
        basis=_basis(energies),
    ), None


def _energy_columns(inference: MeasuredInference, algorithms: Sequence[AlgorithmName]) -> list[float]:
    """The columns of the fit: seconds whole and of the rest, then seconds and FLOPs by algorithm."""
    assert inference.energy_s is not None
    of = {name: [layer for layer in inference.layers if layer.runs == name] for name in algorithms}
    seconds = [sum(layer.latency_s for layer in its) for its in of.values()]
    flops = [float(sum(layer.shape.flops for layer in its)) for its in of.values()]
    return [inference.energy_s, max(inference.rest_s, 0.0), *seconds, *flops]


def _choice(inferences: Sequence[MeasuredInference]) -> AlgorithmName | None:
    runs = [
        layer.runs for each in inferences for layer in each.layers if layer.fell_back or layer.requested == FALLBACK
    ]
    return Counter(runs).most_common(1)[0][0] if runs else None


def _basis(energies: Sequence[MeasuredInference]) -> str:
    models = dict.fromkeys(energy.model for energy in energies)
    algorithms = dict.fromkeys(each.requested for each in energies)
    sizes = sorted({each.input_size for each in energies})
    return (
        f"{counted(len(energies), 'inference')}: {', '.join(models)}; {', '.join(algorithms)}; "
        f"{', '.join(map(str, sizes))} pixels"
    )
