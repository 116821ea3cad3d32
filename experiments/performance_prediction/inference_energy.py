"""In: inferences with measured energy; out: the energy of any inference, and the share of each layer. Pure.

Joules are so much for each second of an inference (idle power, waiting included), for each second that the device works,
for each FLOP and for each byte of the convolutions. A layer has the share of its time, as in the tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from experiments.performance_prediction.prediction_tables import MeasuredInference

# Fewer inferences than this are no basis for a fit.
LEAST_ENERGIES = 8
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class EnergyModel:
    """Coefficients of 0 and more.

    Attributes:
        basis: what it was fitted to, in words.
    """

    whole_w: float
    device_w: float
    per_flop_j: float
    per_byte_j: float
    basis: str

    def joules(self, whole_s: float, device_s: float, flops: float, moved_bytes: float) -> float:
        """Of one inference in a row of them.

        Args:
            whole_s: with the host, device_s: without.
            flops, moved_bytes: of all convolutions.
        """
        return (
            self.whole_w * whole_s + self.device_w * device_s + self.per_flop_j * flops + self.per_byte_j * moved_bytes
        )


def fit_energy(energies: Sequence[MeasuredInference]) -> tuple[EnergyModel | None, str | None]:
    """The model by relative least squares, or None with the reason."""
    if len(energies) < LEAST_ENERGIES:
        return None, f"energy was measured of {len(energies)} inferences; a fit needs {LEAST_ENERGIES}"
    target = np.array([each.energy_j for each in energies], dtype=np.float64)
    columns = np.array([[each.energy_s, each.device_s, *work(each)] for each in energies], dtype=np.float64)
    scale = columns.mean(axis=0)
    found, _ = nnls(columns / scale / target[:, None], np.ones(len(target)))
    return EnergyModel(*(float(each) for each in found / scale), basis=_basis(energies)), None


def work(inference: MeasuredInference) -> tuple[float, float]:
    """FLOPs and bytes of the convolutions."""
    shapes = [layer.shape for layer in inference.layers]
    return float(sum(shape.flops for shape in shapes)), float(sum(shape.bytes(_ELEMENT_BYTES) for shape in shapes))


def _basis(energies: Sequence[MeasuredInference]) -> str:
    models = dict.fromkeys(each.model for each in energies)
    algorithms = dict.fromkeys(each.asked for each in energies)
    sizes = sorted({each.input_size for each in energies})
    return (
        f"{len(energies)} inferences: {', '.join(models)}; {', '.join(algorithms)}; "
        f"{', '.join(map(str, sizes))} pixels"
    )
