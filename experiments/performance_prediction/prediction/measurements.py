"""The measurements in tables of profiles: one record an inference with its layers, in seconds and joules.

Only sizes that were measured count. Where several tables have the same combination and size, its time comes from the
first one, and its energy from each that has energy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiment_core_utils.primitives.csv_tables import Cell
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import shortened
from experiment_core_utils.primitives.texts import counted
from experiments.performance_prediction.algorithms.convolution import (
    ALGORITHMS,
    AlgorithmName,
    ConvShape,
    Pair,
    algorithm_named,
)
from experiments.performance_prediction.networks.registry import LAYER_SETS
from experiments.performance_prediction.profiling.tables import (
    LAYER_COLUMNS,
    OVERALL_COLUMNS,
    rows_with_columns,
)

Row = Mapping[str, Cell]
_ADVICE = "correct it, leave the table out, or profile again"
# Of a count, and of a time in milliseconds, an energy or a power: far above any, and a float still tells neighbours.
_MOST = 10**12


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
    #: marked by the timer: its times on the device may contain waits for the host; False in tables that leave it open
    is_launch_bound: bool = False

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
        return tuple(dict.fromkeys(inference.device for inference in self.inferences))

    @property
    def networks(self) -> tuple[MeasuredInference, ...]:
        """The inferences of networks: those of sets of layers are for fitting layers alone."""
        return tuple(inference for inference in self.inferences if inference.model not in LAYER_SETS)

    @property
    def not_launch_bound(self) -> "Measurements":
        """Those that the timer did not mark; raises ResultsError where none is left."""
        kept = Measurements(
            tuple(inference for inference in self.inferences if not inference.is_launch_bound),
            tuple(energy for energy in self.energies if not energy.is_launch_bound),
        )
        if not kept.inferences:
            number = counted(len(self.inferences), "inference")
            raise ResultsError(f"each of {number} is launch-bound; fit without --without-launch-bound")
        return kept

    def of_device(self, device: str) -> "Measurements":
        """The measurements of one device."""
        return Measurements(
            tuple(inference for inference in self.inferences if inference.device == device),
            tuple(energy for energy in self.energies if energy.device == device),
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
    measured = [row for row in _rows(overall, OVERALL_COLUMNS) if row.cells["status"] == "ok"]
    if not measured:
        return
    layers: dict[int, list[MeasuredLayer]] = {}
    for row in _rows(overall.with_name(overall.name.replace("_overall.csv", "_layers.csv")), LAYER_COLUMNS):
        layers.setdefault(row.count("input_size"), []).append(_layer(row))
    for row in measured:
        size = row.count("input_size")
        if size not in layers:
            raise ResultsRefused(
                f"{row.where} is of size {size}, of which the table of layers next to it has none; {_ADVICE}"
            )
        yield _inference(row, tuple(layers[size]))


@dataclass(frozen=True)
class _TableRow:
    """A row of a table; what cannot be is refused by the file, the row and the column."""

    cells: Row
    where: str  #: the file and the row

    def refused(self, column: str, allowed: str) -> ResultsRefused:
        """The error of a cell that is not what is allowed there."""
        value = shortened(self.cells[column])
        return ResultsRefused(f"{self.where}: {column} is {value}, and it should be {allowed}; {_ADVICE}")

    def count(self, column: str) -> int:
        """A whole number of 1 and more."""
        value = self.cells[column]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise self.refused(column, f"a whole number from 1 to {_MOST}")
        return value

    def positive(self, column: str) -> float:
        """A number above 0."""
        value = self.cells[column]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise self.refused(column, f"a number above 0, at most {_MOST}")
        return float(value)

    def pair(self, column: str) -> Pair:
        """A pair from its cell, such as "3x3"."""
        vertical, _, horizontal = str(self.cells[column]).partition("x")
        if not (vertical.isdecimal() and horizontal.isdecimal() and len(vertical) < 10 > len(horizontal)):
            raise self.refused(column, "a pair of whole numbers such as 3x3")
        return int(vertical), int(horizontal)

    def algorithm(self, column: str) -> AlgorithmName:
        """A published name."""
        try:
            return algorithm_named(str(self.cells[column]))
        except ConfigurationError:
            raise self.refused(column, f"one of {', '.join(ALGORITHMS)}") from None


def _rows(path: Path, columns: Sequence[str]) -> list[_TableRow]:
    if not path.exists():
        raise ResultsError(f"{path} is not there; the two tables of a combination belong together")
    # As editors of tables count, the header is row 1.
    return [
        _TableRow(row, f"{path}, row {number}")
        for number, row in enumerate(rows_with_columns(path, columns, _ADVICE), start=2)
    ]


def _inference(row: _TableRow, layers: tuple[MeasuredLayer, ...]) -> MeasuredInference:
    has_energy = row.cells["energy_per_inference_j"] is not None and row.cells["power_mean_w"] is not None
    joules = row.positive("energy_per_inference_j") if has_energy else None
    return MeasuredInference(
        device=str(row.cells["device_name"]),
        precision=str(row.cells["precision"]),
        model=str(row.cells["model"]),
        requested=row.algorithm("algorithm"),
        input_size=row.count("input_size"),
        batch_size=row.count("batch_size"),
        layers=layers,
        device_s=row.positive("layer_pass_mean_ms") / 1e3,
        whole_s=row.positive("mean") / 1e3,
        energy_j=joules,
        energy_s=None if joules is None else joules / row.positive("power_mean_w"),
        is_launch_bound=row.cells["launch_bound"] is True,
    )


def _layer(row: _TableRow) -> MeasuredLayer:
    cells = row.cells
    try:
        shape = ConvShape(
            batch=row.count("batch_size"),
            in_channels=row.count("in_channels"),
            height=row.count("input_height"),
            width=row.count("input_width"),
            out_channels=row.count("out_channels"),
            kernel=row.pair("kernel_size"),
            stride=row.pair("stride"),
            padding=row.pair("padding"),
            dilation=row.pair("dilation"),
            groups=row.count("groups"),
        )
    except ConfigurationError as error:
        raise ResultsRefused(f"{row.where} is of no convolution: {error}; {_ADVICE}") from error
    return MeasuredLayer(
        layer=str(cells["layer"]),
        shape=shape,
        requested=row.algorithm("algorithm_asked"),
        runs=row.algorithm("algorithm_run"),
        fell_back=cells["fell_back"] is True,
        refusal=None if cells["refusal"] is None else str(cells["refusal"]),
        latency_s=row.positive("mean_ms") / 1e3,
    )


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
        f"caution: in the tables of {each.requested}, {each.far_longer} of {counted(each.shared, 'shape')} took over "
        f"{FAR_LONGER:g} times as long as the same algorithm did elsewhere (up to {each.worst:.0f} times); something "
        "disturbed one of them: measure again, or leave tables out"
        for each in disagreements(layers)
    ]
