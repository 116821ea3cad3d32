"""In: inferences with measured energy; out: the energy of any inference, and the share of each layer. Pure.

Joules are so much for each second of an inference (idle power, waiting included), for each second of its convolutions
and for each of their FLOPs, both by algorithm, and for each second of the other operations. A layer has the share of
its time, as in the tables.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from experiments.performance_prediction.algorithm_support import FALLBACK
from experiments.performance_prediction.convolution import AlgorithmName, ConvShape
from experiments.performance_prediction.prediction_tables import MeasuredInference, Measurements

# Fewer inferences than this are no basis for a fit.
LEAST_ENERGIES = 8


@dataclass(frozen=True)
class ConvolutionWork:
    """One convolution: what runs, for how long, and how much it is."""

    runs: AlgorithmName
    seconds: float
    shape: ConvShape


@dataclass(frozen=True)
class EnergyModel:
    """Coefficients of 0 and more, beyond those of the seconds of a whole inference.

    Attributes:
        convolution_w, per_flop_j: by algorithm that ran; one whose energy was not measured is not in them.
        guess: the algorithm that `guess` ran as most often; None where it was not measured.
        basis: what the model was fitted to, in words.
    """

    whole_w: float
    rest_w: float
    convolution_w: Mapping[AlgorithmName, float]
    per_flop_j: Mapping[AlgorithmName, float]
    guess: AlgorithmName | None
    basis: str

    def joules(
        self, whole_s: float, rest_s: float, convolutions: Iterable[ConvolutionWork]
    ) -> tuple[float | None, str | None]:
        """Joules of one inference in a row of them; None with the reason where an algorithm's energy was not measured.

        Args:
            whole_s: with the host.
            rest_s: of the other operations on the device.
        """
        total = self.whole_w * whole_s + self.rest_w * rest_s
        for each in convolutions:
            runs = self.guess if each.runs == FALLBACK else each.runs
            if runs is None or runs not in self.convolution_w:
                return None, f"energy of {each.runs} was not measured, of {', '.join(self.convolution_w)} it was"
            total += self.convolution_w[runs] * each.seconds + self.per_flop_j[runs] * each.shape.flops
        return total, None


def fit_energy(measured: Measurements) -> tuple[EnergyModel | None, str | None]:
    """The model by relative least squares, or None with the reason."""
    energies = measured.energies
    if len(energies) < LEAST_ENERGIES:
        return None, f"energy was measured of {len(energies)} inferences; a fit needs {LEAST_ENERGIES}"
    algorithms = sorted({layer.runs for each in energies for layer in each.layers})
    target = np.array([each.energy_j for each in energies], dtype=np.float64)
    columns = np.array([_energy_columns(each, algorithms) for each in energies], dtype=np.float64)
    scale = columns.mean(axis=0)
    scaled, _ = nnls(columns / scale / target[:, None], np.ones(len(target)))
    found = [float(each) for each in scaled / scale]
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
    """Seconds whole and of the rest, then seconds and FLOPs of the convolutions by algorithm."""
    assert inference.energy_s is not None
    of = {name: [layer for layer in inference.layers if layer.runs == name] for name in algorithms}
    rest_s = max(inference.device_s - sum(layer.latency_s for layer in inference.layers), 0.0)
    seconds = [sum(layer.latency_s for layer in its) for its in of.values()]
    flops = [float(sum(layer.shape.flops for layer in its)) for its in of.values()]
    return [inference.energy_s, rest_s, *seconds, *flops]


def _choice(inferences: Sequence[MeasuredInference]) -> AlgorithmName | None:
    runs = [layer.runs for each in inferences for layer in each.layers if layer.fell_back or layer.asked == FALLBACK]
    return Counter(runs).most_common(1)[0][0] if runs else None


def _basis(energies: Sequence[MeasuredInference]) -> str:
    models = dict.fromkeys(each.model for each in energies)
    algorithms = dict.fromkeys(each.asked for each in energies)
    sizes = sorted({each.input_size for each in energies})
    return (
        f"{len(energies)} inferences: {', '.join(models)}; {', '.join(algorithms)}; {', '.join(map(str, sizes))} pixels"
    )
