"""One JSON file of fitted predictors and their validation, written and read.

It contains the measured shapes: what is computed from them is computed again on reading.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.records.result_files import read_json_object
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape, algorithm_named
from experiments.performance_prediction.prediction.layer_latency import Hyperparameters, LayerLatency
from experiments.performance_prediction.prediction.network_predictor import DevicePredictor
from experiments.performance_prediction.prediction.support import RequestedShape, SupportRules
from experiments.performance_prediction.prediction.validation import ScoreRow
from experiments.performance_prediction.prediction.whole import EnergyModel, HostModel, RestModel

SCHEMA = "convolution-latency/2"


@dataclass(frozen=True)
class FittedDevice:
    """A predictor and what it was fitted to."""

    predictor: DevicePredictor
    #: models, input_sizes, batch_sizes: of the tables
    models: tuple[str, ...]
    input_sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    scores: tuple[ScoreRow, ...]  #: of the folds; the predictor itself is fitted to everything


def save_fitted(devices: Sequence[FittedDevice], path: Path) -> None:
    """Write the predictors; raises ResultsNotSaved."""
    content = {"schema": SCHEMA, "devices": {device.predictor.device: _written(device) for device in devices}}
    write_json_atomically(content, path)


def load_fitted(path: Path, device: str | None) -> FittedDevice:
    """The predictor of a device, or of the only one where none is named.

    Raises:
        ConfigurationError: no such device, or several and none named.
        ResultsError: no such file, or not one of this version's.
    """
    if not path.is_file():
        raise ResultsError(f"{path} is not there; predict.py fit writes such a file")
    content = read_json_object(path)
    if content.get("schema") != SCHEMA:
        raise ResultsError(f"{path} is not of schema {SCHEMA}; fit again with this version")
    devices = content.get("devices")
    if not isinstance(devices, dict) or not devices:
        raise ResultsError(f"{path} is damaged (no devices in it); fit again")
    if device is None and len(devices) > 1:
        raise ConfigurationError(f"{path} contains {', '.join(devices)}; name one with --device")
    wanted = device or next(iter(devices))
    if wanted not in devices:
        raise ConfigurationError(f"no fit for device {wanted!r} in {path}; there are: {', '.join(devices)}")
    try:
        return _read(wanted, devices[wanted])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({type(error).__name__}: {error}); fit again") from error


def _written(fitted: FittedDevice) -> dict[str, Any]:
    predictor = fitted.predictor
    return {
        "precision": predictor.precision,
        "multiprocessors": predictor.multiprocessors,
        **{name: list(getattr(fitted, name)) for name in ("models", "input_sizes", "batch_sizes")},
        "latencies": {
            name: {
                "shapes": [[*_numbers(shape), seconds] for shape, seconds in latency.measured.items()],
                "hyperparameters": asdict(latency.hyperparameters),
                "interval": list(latency.interval),
            }
            for name, latency in predictor.latencies.items()
        },
        "support": {
            name: [[*_numbers(each.shape), each.refusal] for each in rules.observations]
            for name, rules in predictor.support.items()
        },
        "rest": asdict(predictor.rest),
        "host": None if predictor.host is None else asdict(predictor.host),
        "energy": None if predictor.energy is None else asdict(predictor.energy),
        "energy_reason": predictor.energy_reason,
        "scores": [asdict(row) for row in fitted.scores],
    }


def _read(device: str, content: Mapping[str, Any]) -> FittedDevice:
    latencies: dict[AlgorithmName, LayerLatency] = {}
    multiprocessors = int(content["multiprocessors"])
    for name, its in content["latencies"].items():
        algorithm = algorithm_named(name)
        measured = {_shape(row[:-1]): float(row[-1]) for row in its["shapes"]}
        found = its["hyperparameters"]
        hyperparameters = Hyperparameters(tuple(found["lengths"]), found["signal"], found["noise"])
        low, high = map(float, its["interval"])
        latencies[algorithm] = LayerLatency(algorithm, multiprocessors, measured, hyperparameters, (low, high))
    support = {
        algorithm_named(name): SupportRules(
            algorithm_named(name), [RequestedShape(_shape(row[:-1]), row[-1]) for row in rows]
        )
        for name, rows in content["support"].items()
    }
    predictor = DevicePredictor(
        device,
        multiprocessors,
        content["precision"],
        latencies,
        support,
        RestModel(**content["rest"]),
        None if content["host"] is None else HostModel(**content["host"]),
        None if content["energy"] is None else EnergyModel(**content["energy"]),
        content["energy_reason"],
    )
    scores = tuple(ScoreRow(**row) for row in content["scores"])
    models, sizes, batches = (tuple(content[name]) for name in ("models", "input_sizes", "batch_sizes"))
    return FittedDevice(predictor, models, sizes, batches, scores)


def _numbers(shape: ConvShape) -> list[int]:
    sizes = [shape.batch, shape.in_channels, shape.height, shape.width, shape.out_channels, shape.groups]
    return [*sizes, *shape.kernel, *shape.stride, *shape.padding, *shape.dilation]


def _shape(row: Sequence[int]) -> ConvShape:
    batch, in_channels, height, width, out_channels, groups, *pairs = row
    kernel, stride, padding, dilation = ((pairs[place], pairs[place + 1]) for place in (0, 2, 4, 6))
    return ConvShape(batch, in_channels, height, width, out_channels, kernel, stride, padding, dilation, groups)
