"""The mix of a network at a size: for each layer the algorithm of the shortest predicted latency.

The gain of a mix is taken from measurements that had no part in choosing it: the predictor that chooses has not seen
the size. If the shortest of several measured times were both chosen and reported, noise would make it too good.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.performance_prediction.algorithms.convolution import AlgorithmName
from experiments.performance_prediction.algorithms.support import FALLBACK
from experiments.performance_prediction.prediction.measurements import MeasuredInference, Measurements
from experiments.performance_prediction.prediction.network_predictor import DevicePredictor, PredictedInference
from experiments.performance_prediction.prediction.operations import network_operations

# It means an unchanged network, with whatever torch chooses: no algorithm of a layer.
NO_CANDIDATE: AlgorithmName = "torch"
# What is predicted to gain less than this, of the order of a prediction's error, is left with `guess`.
LEAST_GAIN = 0.05


@dataclass(frozen=True)
class MeasuredGain:
    """The gain of a mix that was chosen without having seen the size; seconds of the convolutions."""

    model: str
    input_size: int
    guess_s: float  #: all layers with `guess`
    mix_s: float  #: each with what was chosen for it
    best_s: float  #: each with the shortest measured time: what no choice can beat, too good by the noise of measuring
    predicted_guess_s: float
    predicted_mix_s: float
    layers: int
    changed: int  #: layers for which another algorithm than `guess` was chosen
    refused: int  #: of those, where the choice was refused, so that `guess` runs


def best_mix(
    predictor: DevicePredictor, model: str, input_size: int, batch_size: int = 1
) -> tuple[PredictedInference, dict[str, AlgorithmName]]:
    """The prediction with each layer's fastest algorithm of those expected to be granted, and the algorithms.

    `guess` stays where none is predicted to be quicker by `LEAST_GAIN`. Raises ConfigurationError as
    `DevicePredictor.predict`.
    """
    base = predictor.predict(model, FALLBACK, input_size, batch_size)
    best = {layer.layer: ((1 - LEAST_GAIN) * layer.latency.seconds, FALLBACK) for layer in base.layers}
    shapes = network_operations(model, input_size, batch_size).convolutions
    for algorithm in predictor.algorithms:
        if algorithm in (FALLBACK, NO_CANDIDATE):
            continue
        granted = [name for name, shape in shapes.items() if predictor.support_of(shape, algorithm).granted]
        latencies = predictor.latencies[algorithm].predict([shapes[name] for name in granted])
        for name, latency in zip(granted, latencies, strict=True):
            if latency.seconds < best[name][0]:
                best[name] = (latency.seconds, algorithm)
    chosen = {name: algorithm for name, (_, algorithm) in best.items()}
    return predictor.predict_layers(model, chosen, input_size, batch_size), chosen


def measured_gains(predictor: DevicePredictor, test: Measurements) -> list[MeasuredGain]:
    """The gain for each network and size of `test` with `guess` measured; `predictor` was fitted to none of them."""
    networks: dict[tuple[str, int, int], dict[AlgorithmName, MeasuredInference]] = {}
    for each in test.inferences:
        networks.setdefault(each.network, {})[each.requested] = each
    return [
        _gain(predictor, found, size, batch)
        for (_, size, batch), found in networks.items()
        if FALLBACK in found and FALLBACK in predictor.algorithms
    ]


def _gain(
    predictor: DevicePredictor, found: Mapping[AlgorithmName, MeasuredInference], size: int, batch: int
) -> MeasuredGain:
    guess = found[FALLBACK]
    mix, chosen = best_mix(predictor, guess.model, size, batch)
    base = predictor.predict(guess.model, FALLBACK, size, batch)
    # Seconds by layer, without those that fell back.
    times = {
        algorithm: {layer.layer: layer.latency_s for layer in inference.layers if not layer.fell_back}
        for algorithm, inference in found.items()
        if algorithm != NO_CANDIDATE
    }
    changed = [name for name, algorithm in chosen.items() if algorithm != FALLBACK]
    return MeasuredGain(
        model=guess.model,
        input_size=size,
        guess_s=sum(times[FALLBACK].values()),
        mix_s=sum(times.get(chosen[name], {}).get(name, seconds) for name, seconds in times[FALLBACK].items()),
        best_s=sum(min(its[name] for its in times.values() if name in its) for name in times[FALLBACK]),
        predicted_guess_s=base.convolutions_s,
        predicted_mix_s=mix.convolutions_s,
        layers=len(chosen),
        changed=len(changed),
        refused=sum(name not in times.get(chosen[name], {}) for name in changed),
    )


def counts_of(chosen: Sequence[AlgorithmName]) -> str:
    """The number of layers of each algorithm, most first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(chosen).most_common())
