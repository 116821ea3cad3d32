"""In: measured inferences; out: what networks cost beside their convolutions: other operations, and the host. Pure.

On the device an inference is the sum of its convolutions and of a rest: so much for each other operation and for each
byte that it moves. With the host it is the longer of that and of the time in which the host issues everything: so much
for each convolution, by algorithm, and for each other operation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from experiments.performance_prediction.convolution import AlgorithmName
from experiments.performance_prediction.network_operations import NetworkOperations
from experiments.performance_prediction.prediction_tables import MeasuredInference

# An inference that took this much longer than its work on the device waited for the host.
_WAITED = 1.15

# A network, its input size and its batch size.
NetworkKey = tuple[str, int, int]


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
    """Relative least squares, coefficients of 0 and more, over the median rest of each network and size."""
    rests: dict[NetworkKey, list[float]] = {}
    of_key: dict[NetworkKey, NetworkOperations] = {}
    for inference, its in zip(inferences, operations, strict=True):
        key = (inference.model, inference.input_size, inference.batch_size)
        rests.setdefault(key, []).append(inference.device_s - sum(layer.latency_s for layer in inference.layers))
        of_key[key] = its
    medians = {key: float(np.median(found)) for key, found in rests.items()}
    positive = [key for key, median in medians.items() if median > 0]
    if not positive:
        return RestModel(0.0, 0.0, 0.0)
    target = np.array([medians[key] for key in positive])
    counted = np.array([_columns(of_key[key]) for key in positive], dtype=np.float64)
    found, _ = nnls(counted / target[:, None], np.ones(len(target)))
    return RestModel(*(float(each) for each in found))


def fit_host(inferences: Sequence[MeasuredInference], operations: Sequence[NetworkOperations]) -> HostModel | None:
    """Relative least squares over the inferences that waited for the host; None where none did."""
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
    found, _ = nnls(columns / target[:, None], np.ones(len(target)))
    return HostModel(dict(zip(algorithms, map(float, found[:-1]), strict=True)), float(found[-1]))


def run_as(inference: MeasuredInference) -> list[AlgorithmName]:
    """What each convolution runs as: the algorithm that was requested, or `guess` where it fell back."""
    return ["guess" if layer.fell_back else layer.asked for layer in inference.layers]


def _columns(operations: NetworkOperations) -> tuple[int, int, int]:
    return operations.others, operations.other_bytes, operations.product_bytes
