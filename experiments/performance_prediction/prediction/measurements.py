"""The measurements in tables of profiles: one record an inference with its layers, in seconds and joules.

Only sizes that were measured count. Where several tables have the same combination and size, its time comes from the
first one, and its energy from each that has energy.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import ResultsError
from experiments.performance_prediction.algorithms.convolution import AlgorithmName, ConvShape, Pair, algorithm_named
from experiments.performance_prediction.networks.registry import LAYER_SETS
from experiments.performance_prediction.profiling.tables import (
    LAYER_COLUMNS,
    OVERALL_COLUMNS,
    rows_with_columns,
    whole_number,
)

Row = Mapping[str, Cell]
# How often a kernel ran, behind its name.
_REPEATS = re.compile(r" x\d+(?= \+ |$)")


@dataclass(frozen=True)
class MeasuredLayer:
    """A convolution of a measured inference."""

    layer: str
    shape: ConvShape
    requested: AlgorithmName
    runs: AlgorithmName  #: the algorithm that ran; for `guess` its choice
    fell_back: bool  #: `guess` ran because the algorithm that was requested refused, for the reason `refusal`
    refusal: str | None
    latency_s: float  #: mean of the layer pass, bias included
    #: names of the kernels in the order of their first start, without how often each ran; None where not known
    kernels: str | None = None


@dataclass(frozen=True)
class MeasuredInference:
    """A row of an overall table with its layers."""

    device: str
    precision: str
    model: str
    requested: AlgorithmName
    input_size: int
    batch_size: int
    layers: tuple[MeasuredLayer, ...]
    device_s: float  #: mean of the layer pass; on a GPU without waiting for the host
    whole_s: float  #: mean of the whole-model pass
    energy_j: float | None  #: of one inference; None where it was not measured
    energy_s: float | None  #: an inference in the energy window; None likewise

    @property
    def network(self) -> tuple[str, int, int]:
        """Model, input size and batch size."""
        return self.model, self.input_size, self.batch_size

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """The key that is the same for the same inference."""
        return self.device, self.requested, *self.network

    @property
    def rest_s(self) -> float:
        """Seconds on the device of everything but the convolutions; below 0 where noise is more than that."""
        return self.device_s - sum(layer.latency_s for layer in self.layers)


@dataclass(frozen=True)
class Measurements:
    """The measurements that a predictor is fitted to."""

    inferences: tuple[MeasuredInference, ...]  #: each combination and size once
    energies: tuple[MeasuredInference, ...]  #: those with energy; some of them may be no members of `inferences`

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices in the order of their first occurrence."""
        return tuple(dict.fromkeys(each.device for each in self.inferences))

    @property
    def networks(self) -> tuple[MeasuredInference, ...]:
        """The inferences of networks: those of sets of layers are for fitting layers alone."""
        return tuple(each for each in self.inferences if each.model not in LAYER_SETS)

    def of_device(self, device: str) -> "Measurements":
        """The measurements of one device."""
        return Measurements(
            tuple(each for each in self.inferences if each.device == device),
            tuple(each for each in self.energies if each.device == device),
        )


def read_measurements(paths: Sequence[Path]) -> Measurements:
    """The measurements in these folders (including sub-folders) and `*_overall.csv` files.

    Raises:
        ResultsError: no such file, a table of another version, nothing measured, or more than one precision.
    """
    found = [inference for path in paths for table in _overall_tables(path) for inference in _inferences(table)]
    if not found:
        raise ResultsError(f"nothing measured in {', '.join(map(str, paths))}; run_profile.py writes such tables")
    precisions = sorted({each.precision for each in found})
    if len(precisions) > 1:
        raise ResultsError(f"the tables are of precisions {', '.join(precisions)}; fit one at a time")
    first: dict[tuple[str, str, str, int, int], MeasuredInference] = {}
    for each in found:
        first.setdefault(each.key, each)
    return Measurements(tuple(first.values()), tuple(each for each in found if each.energy_j is not None))


def _overall_tables(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ResultsError(f"{path} does not exist; give a results folder of run_profile.py or an *_overall.csv")
    tables = sorted(path.rglob("*_overall.csv"))
    if not tables:
        raise ResultsError(f"{path} contains no *_overall.csv; give a results folder of run_profile.py or such a file")
    return tables


def _inferences(overall: Path) -> Iterable[MeasuredInference]:
    measured = [row for row in _rows(overall, OVERALL_COLUMNS) if row["status"] == "ok"]
    if not measured:
        return
    layers: dict[Cell, list[MeasuredLayer]] = {}
    for row in _rows(overall.with_name(overall.name.replace("_overall.csv", "_layers.csv")), LAYER_COLUMNS):
        layers.setdefault(row["input_size"], []).append(_layer(row))
    for row in measured:
        if row["input_size"] not in layers:
            raise ResultsError(
                f"{overall} has size {row['input_size']} without its layers; the table next to it is incomplete"
            )
        yield _inference(row, tuple(layers[row["input_size"]]))


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, Cell]]:
    if not path.exists():
        raise ResultsError(f"{path} is not there; the two tables of a combination belong together")
    return rows_with_columns(path, columns, "profile again")


def _inference(row: Row, layers: tuple[MeasuredLayer, ...]) -> MeasuredInference:
    joules, watts = row["energy_per_inference_j"], row["power_mean_w"]
    return MeasuredInference(
        device=str(row["device_name"]),
        precision=str(row["precision"]),
        model=str(row["model"]),
        requested=algorithm_named(str(row["algorithm"])),
        input_size=whole_number(row["input_size"]),
        batch_size=whole_number(row["batch_size"]),
        layers=layers,
        device_s=_number(row["layer_pass_mean_ms"]) / 1e3,
        whole_s=_number(row["mean"]) / 1e3,
        energy_j=None if joules is None or watts is None else _number(joules),
        energy_s=None if joules is None or watts is None else _number(joules) / _number(watts),
    )


def _layer(row: Row) -> MeasuredLayer:
    return MeasuredLayer(
        layer=str(row["layer"]),
        shape=ConvShape(
            batch=whole_number(row["batch_size"]),
            in_channels=whole_number(row["in_channels"]),
            height=whole_number(row["input_height"]),
            width=whole_number(row["input_width"]),
            out_channels=whole_number(row["out_channels"]),
            kernel=_pair(row["kernel_size"]),
            stride=_pair(row["stride"]),
            padding=_pair(row["padding"]),
            dilation=_pair(row["dilation"]),
            groups=whole_number(row["groups"]),
        ),
        requested=algorithm_named(str(row["algorithm_asked"])),
        runs=algorithm_named(str(row["algorithm_run"])),
        fell_back=row["fell_back"] is True,
        refusal=None if row["refusal"] is None else str(row["refusal"]),
        latency_s=_number(row["mean_ms"]) / 1e3,
        kernels=None if row["kernel_names"] is None else _REPEATS.sub("", str(row["kernel_names"])),
    )


def _pair(cell: Cell) -> Pair:
    """A pair from its cell, such as "3x3"."""
    vertical, _, horizontal = str(cell).partition("x")
    if not (vertical.isdecimal() and horizontal.isdecimal()):
        raise ResultsError(f"{cell!r} is not a pair such as 3x3; the table is not one of this version's")
    return int(vertical), int(horizontal)


def _number(cell: Cell) -> float:
    if not isinstance(cell, int | float):
        raise ResultsError(f"{cell!r} is not a number; the table is not one of this version's")
    return float(cell)


# Times the median of the other tables.
FAR_LONGER = 2.0
# Of the shapes that a table has in common with others.
LARGE_FRACTION = 0.1


@dataclass(frozen=True)
class Disagreement:
    """The times in the tables of one algorithm against those in all others."""

    requested: AlgorithmName  #: the algorithm that was requested
    far_longer: int  #: shapes whose layers took more than `FAR_LONGER` times the others' median
    shared: int  #: shapes that other tables have too, run by the same algorithm
    worst: float  #: the largest of the ratios


def disagreements(layers: Iterable[MeasuredLayer]) -> list[Disagreement]:
    """Algorithms in whose tables more than `LARGE_FRACTION` of the shared shapes took far longer."""
    seconds: dict[tuple[ConvShape, AlgorithmName], dict[AlgorithmName, list[float]]] = {}
    for layer in layers:
        seconds.setdefault((layer.shape, layer.runs), {}).setdefault(layer.requested, []).append(layer.latency_s)
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
        f"caution: in the tables of {each.requested}, {each.far_longer} of {each.shared} shapes took over "
        f"{FAR_LONGER:g} times as long as the same algorithm did elsewhere (up to {each.worst:.0f} times); something "
        "disturbed one of them: measure again, or leave tables out"
        for each in disagreements(layers)
    ]
