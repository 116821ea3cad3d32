"""A predictor of any layer and of whole networks on one device, fitted to its measurements."""

from collections.abc import Mapping
from dataclasses import dataclass

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.performance_prediction.algorithms.convolution import ALGORITHMS, AlgorithmName, ConvShape
from experiments.performance_prediction.algorithms.support import FALLBACK
from experiments.performance_prediction.prediction.layer_latency import (
    LEAST_SHAPES,
    LayerLatency,
    PredictedLatency,
    seconds_by_shape,
)
from experiments.performance_prediction.prediction.measurements import Measurements
from experiments.performance_prediction.prediction.operations import network_operations
from experiments.performance_prediction.prediction.support import Support, SupportRules, observed
from experiments.performance_prediction.prediction.whole import (
    EnergyModel,
    HostModel,
    RestModel,
    fit_energy,
    fit_host,
    fit_rest,
)
from experiments.performance_prediction.prediction.work import multiprocessors_of


@dataclass(frozen=True)
class PredictedLayer:
    """The prediction of one convolution."""

    layer: str
    shape: ConvShape
    requested: AlgorithmName  #: the algorithm that was requested, or that a mix chose
    runs: AlgorithmName  #: the same, or `guess` where it is not expected to be granted
    support: Support  #: why
    latency: PredictedLatency
    energy_j: float | None  #: None where energy was not fitted


@dataclass(frozen=True)
class PredictedInference:
    """The prediction of one network with one algorithm, or a mix of them, at one size."""

    model: str
    requested: AlgorithmName | None  #: None for a mix
    input_size: int
    batch_size: int
    layers: tuple[PredictedLayer, ...]
    #: convolutions_s, rest_s: sum of the layers, and the other operations on the device
    convolutions_s: float
    rest_s: float
    device_s: float  #: both
    host_s: float | None  #: in which the host issues everything; None where it was never waited for
    whole_s: float  #: the longer of the two
    energy_j: float | None  #: None with a reason
    energy_reason: str | None


@dataclass(frozen=True)
class DevicePredictor:
    """The predictor of one device, with everything that was fitted."""

    device: str
    multiprocessors: int
    precision: str
    latencies: Mapping[AlgorithmName, LayerLatency]  #: by algorithm; one that ran in too few shapes is not in it
    support: Mapping[AlgorithmName, SupportRules]  #: by algorithm that was requested
    rest: RestModel
    host: HostModel | None
    energy: EnergyModel | None  #: None with a reason
    energy_reason: str | None

    @property
    def algorithms(self) -> tuple[AlgorithmName, ...]:
        """The algorithms that can be requested."""
        return tuple(each for each in self.support if each in self.latencies)

    def support_of(self, shape: ConvShape, algorithm: AlgorithmName) -> Support:
        """The expected support of a shape; raises ConfigurationError for an algorithm that was not measured here."""
        if algorithm not in self.algorithms:
            raise ConfigurationError(
                f"{algorithm} was not fitted for {self.device}; there are: {', '.join(self.algorithms)}"
            )
        return self.support[algorithm].of(shape)

    def predict(self, model: str, requested: AlgorithmName, input_size: int, batch_size: int = 1) -> PredictedInference:
        """The prediction of a network with one algorithm, `guess` where it is not expected to be granted.

        Raises:
            ConfigurationError: an algorithm that was not fitted, a network that is not there, an input too small.
        """
        operations = network_operations(model, input_size, batch_size)
        names = dict.fromkeys(operations.convolutions, requested)
        return self.predict_layers(model, names, input_size, batch_size, requested)

    def predict_layers(
        self,
        model: str,
        chosen: Mapping[str, AlgorithmName],
        input_size: int,
        batch_size: int = 1,
        requested: AlgorithmName | None = None,
    ) -> PredictedInference:
        """The prediction of a network with an algorithm for each layer by name. Raises as `predict`."""
        operations = network_operations(model, input_size, batch_size)
        shapes = operations.convolutions
        support = {name: self.support_of(shape, chosen[name]) for name, shape in shapes.items()}
        runs = {name: chosen[name] if support[name].granted else FALLBACK for name in shapes}
        latencies = self._latencies(shapes, runs)
        convolutions_s = sum(each.seconds for each in latencies.values())
        rest_s = self.rest.seconds(operations)
        device_s = convolutions_s + rest_s
        host_s = None if self.host is None else self.host.seconds(list(runs.values()), operations)
        whole_s = device_s if host_s is None else max(device_s, host_s)
        work = [(runs[name], latencies[name].seconds, shape) for name, shape in shapes.items()]
        joules, reason = None, self.energy_reason
        if self.energy is not None:
            joules, reason = self.energy.joules(whole_s, rest_s, work)
        layers = tuple(
            PredictedLayer(name, shape, chosen[name], runs[name], support[name], latency, joules_of_layer)
            for name, shape in shapes.items()
            for latency in [latencies[name]]
            for joules_of_layer in [None if joules is None else joules * latency.seconds / device_s]
        )
        seconds = convolutions_s, rest_s, device_s, host_s, whole_s
        return PredictedInference(model, requested, input_size, batch_size, layers, *seconds, joules, reason)

    def _latencies(
        self, shapes: Mapping[str, ConvShape], runs: Mapping[str, AlgorithmName]
    ) -> dict[str, PredictedLatency]:
        found: dict[str, PredictedLatency] = {}
        for algorithm in dict.fromkeys(runs.values()):
            if algorithm not in self.latencies:
                raise ConfigurationError(
                    f"{algorithm} is to replace an unsupported layer, but was not fitted for {self.device}; fit tables "
                    f"with {FALLBACK} too"
                )
            names = [name for name in shapes if runs[name] == algorithm]
            distinct = list(dict.fromkeys(shapes[name] for name in names))
            by_shape = dict(zip(distinct, self.latencies[algorithm].predict(distinct), strict=True))
            found.update({name: by_shape[shapes[name]] for name in names})
        return found


def fit_device(measured: Measurements, left_out: frozenset[ConvShape] = frozenset()) -> DevicePredictor:
    """The predictor fitted to measurements of one device.

    Args:
        left_out: shapes whose layers no latency and no rule of support may see.

    Raises:
        ResultsError: several devices, or no algorithm that ran in enough shapes.
    """
    if len(measured.devices) != 1:
        raise ResultsError(f"a fit is for one device, these tables are of {', '.join(measured.devices) or 'none'}")
    device = measured.devices[0]
    layers = [layer for one in measured.inferences for layer in one.layers if layer.shape not in left_out]
    latencies = {}
    multiprocessors = multiprocessors_of(device)
    for algorithm in ALGORITHMS:
        seconds = seconds_by_shape(layers, algorithm)
        if len(seconds) >= LEAST_SHAPES:
            latencies[algorithm] = LayerLatency(algorithm, multiprocessors, seconds)
    if not latencies:
        raise ResultsError(f"no algorithm ran in {LEAST_SHAPES} different layers on {device}; profile more")
    requested = dict.fromkeys(inference.requested for inference in measured.inferences)
    networks = measured.networks
    operations = [network_operations(*network.network) for network in networks]
    energy, energy_reason = fit_energy(measured)
    return DevicePredictor(
        device=device,
        multiprocessors=multiprocessors,
        precision=measured.inferences[0].precision,
        latencies=latencies,
        support={algorithm: SupportRules(algorithm, observed(layers, algorithm)) for algorithm in requested},
        rest=fit_rest(networks, operations),
        host=fit_host(networks, operations),
        energy=energy,
        energy_reason=energy_reason,
    )
