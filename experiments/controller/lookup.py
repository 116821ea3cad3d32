"""A lookup table of the best measured setting for a budget, kept in a small file. Also a command.

python -m experiments.controller.lookup build RESULTS_DIR --output lookup.json
python -m experiments.controller.lookup predict lookup.json --budget_ms 120
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.knobs import TIERS
from experiment_core_utils.primitives.units import check_at_least
from experiment_core_utils.records.result_files import field_fault, read_json_object
from experiment_core_utils.records.setting_result import Amount, Count, Knob, Share, Time
from experiments.controller.knob_choices import KnobChoice
from experiments.controller.measured_grid import MeasuredGrid, load_grid
from experiments.controller.policies.interface import RequestFeatures, check_budget

SCHEMA_VERSION = 1
KIND = "lookup_policy"
Aggregation = Literal["mean", "median", "max_accuracy"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True)
class LookupEntry:
    """A measured setting, over the samples that it was measured on."""

    choice: KnobChoice
    accuracy: float  #: mean of score / best score over the samples that have a score
    num_scored: int
    #: latency_mean_ms, latency_median_ms: of `T_total` over the samples that were measured
    latency_mean_ms: float
    latency_median_ms: float
    num_measured: int


@with_config(ConfigDict(strict=True))
class _StoredEntry(TypedDict):
    tier: Literal[tuple(TIERS)]  # type: ignore[valid-type]
    top_k: Knob
    num_active_blocks: Knob
    accuracy: Share
    num_scored: Count
    latency_mean_ms: Time
    latency_median_ms: Time
    num_measured: Count


@with_config(ConfigDict(strict=True))
class _StoredLookup(TypedDict):
    aggregation_method: Aggregation
    tolerance: Amount
    entries: Annotated[list[_StoredEntry], Field(min_length=1)]
    sample_ids: dict[str, list[Count]]
    source: dict[str, Any]


_STORED = TypeAdapter(_StoredLookup)


@dataclass(frozen=True)
class Lookup:
    """The table of measured settings that `predict` reads.

    A setting fits a budget where its latency is at most budget x (1 + tolerance). Its latency is, by
    `aggregation_method`,

    - `mean`: the mean over its samples,
    - `median`: their median,
    - `max_accuracy`: the smaller of the two, so that the most accurate setting that fits by either is taken.

    Of those that fit the most accurate one is taken, of equally accurate ones the one of the lowest latency. Where none
    fits, the one whose latency is nearest to the budget, which is the fastest.
    """

    aggregation_method: Aggregation
    tolerance: float  #: fraction of the budget by which a setting's latency may be above it; 0.05 is five percent
    entries: tuple[LookupEntry, ...]  #: in order of tier, top-k and blocks
    sample_ids: Mapping[str, tuple[int, ...]]  #: task -> the samples that the entries are based on
    source: Mapping[str, Any]  #: provenance of the results

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return f"lookup_{self.aggregation_method}"

    def choose(self, request: RequestFeatures, budget_s: float) -> KnobChoice:
        """See `Policy.choose`; the choice is the same for every request."""
        return predict(self, 1000 * budget_s).choice

    def latency_ms(self, entry: LookupEntry) -> float:
        """The latency of an entry by `aggregation_method`."""
        by_method: dict[Aggregation, float] = {
            "mean": entry.latency_mean_ms,
            "median": entry.latency_median_ms,
            "max_accuracy": min(entry.latency_mean_ms, entry.latency_median_ms),
        }
        return by_method[self.aggregation_method]

    def fits(self, entry: LookupEntry, budget_ms: float) -> bool:
        """Whether the setting's latency is within the budget and its tolerance."""
        return self.latency_ms(entry) <= budget_ms * (1 + self.tolerance)


def build(grid: MeasuredGrid, aggregation_method: Aggregation = "mean", tolerance: float = 0.0) -> Lookup:
    """A table of every choice of the grid that has a score and a time; each sample counts the same, whatever its task.

    Raises:
        ConfigurationError: a tolerance below 0 or not finite, or an unknown method.
        ResultsError: no choice has both a score and a time.
    """
    _check(aggregation_method, tolerance)
    fractions, total_ms = grid.shares, 1000 * grid.total_s
    entries = []
    for row, choice in enumerate(grid.choices):
        scored, measured = fractions[row][np.isfinite(fractions[row])], total_ms[row][np.isfinite(total_ms[row])]
        if len(scored) and len(measured):
            mean, median = float(measured.mean()), float(np.median(measured))
            entries.append(LookupEntry(choice, float(scored.mean()), len(scored), mean, median, len(measured)))
    if not entries:
        raise ResultsError("no setting has samples with a score and samples with a time; measure some")
    ids: dict[str, list[int]] = {}
    for task, sample_id in zip(grid.tasks, grid.sample_ids, strict=True):
        ids.setdefault(task, []).append(sample_id)
    by_task = {task: tuple(own) for task, own in ids.items()}
    return Lookup(aggregation_method, tolerance, tuple(entries), by_task, grid.source)


def predict(lookup: Lookup, budget_ms: float) -> LookupEntry:
    """The best setting for a budget; see `Lookup`. Raises ConfigurationError for a budget that is not above 0."""
    check_budget(budget_ms / 1000)
    fitting = [entry for entry in lookup.entries if lookup.fits(entry, budget_ms)]
    if not fitting:
        return min(lookup.entries, key=lambda entry: abs(lookup.latency_ms(entry) - budget_ms))
    return max(fitting, key=lambda entry: (entry.accuracy, -lookup.latency_ms(entry)))


def save(lookup: Lookup, path: Path) -> None:
    """Write the JSON file of docs/controller/evaluation.md; raises ResultsNotSaved where the disk refuses."""
    write_json_atomically(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "aggregation_method": lookup.aggregation_method,
            "tolerance": lookup.tolerance,
            "entries": [entry_fields(entry) for entry in lookup.entries],
            "sample_ids": {task: list(ids) for task, ids in lookup.sample_ids.items()},
            "source": dict(lookup.source),
        },
        path,
    )


def entry_fields(entry: LookupEntry) -> dict[str, Any]:
    """The fields of one entry as in the file: the three knobs, then the figures."""
    figures = asdict(entry)
    return figures.pop("choice") | figures


def load(path: Path) -> Lookup:
    """The lookup that `save` wrote; raises ResultsError for any other file."""
    content = read_json_object(path)
    if content.get("kind") != KIND or content.get("schema_version") != SCHEMA_VERSION:
        raise ResultsError(
            f"{path} is not a {KIND} of version {SCHEMA_VERSION} (it has kind {content.get('kind')!r}, version "
            f"{content.get('schema_version')!r}); build it with experiments.controller.lookup"
        )
    try:
        stored = _STORED.validate_python(content)
    except ValidationError as error:
        raise ResultsError(f"{path} {field_fault(error)}; build it again") from error
    entries = (
        LookupEntry(
            KnobChoice(each["tier"], each["top_k"], each["num_active_blocks"]),
            each["accuracy"],
            each["num_scored"],
            each["latency_mean_ms"],
            each["latency_median_ms"],
            each["num_measured"],
        )
        for each in stored["entries"]
    )
    by_task = {task: tuple(ids) for task, ids in stored["sample_ids"].items()}
    return Lookup(stored["aggregation_method"], stored["tolerance"], tuple(entries), by_task, stored["source"])


def _check(aggregation_method: str, tolerance: float) -> None:
    if aggregation_method not in AGGREGATIONS:
        raise ConfigurationError(
            f"--aggregation_method {aggregation_method!r} is unknown; choose among {', '.join(AGGREGATIONS)}"
        )
    check_at_least("--tolerance", tolerance, 0.0)


def build_parser() -> argparse.ArgumentParser:
    """The flags of both commands."""
    parser = OneLineParser(prog="experiments.controller.lookup", description="Find the best setting for a budget.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="build a table from results")
    making.add_argument("results", type=Path, nargs="+", metavar="RESULTS",
                        help="--output_dir of a run (several: one sweep), or a table of a full grid")  # fmt: skip
    making.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file for the table")
    making.add_argument("--aggregation_method", choices=AGGREGATIONS, default="mean",
                        help="how the latencies of a setting's samples are combined")  # fmt: skip
    making.add_argument("--tolerance", type=float, default=0.0, metavar="SHARE",
                        help="fraction of the budget by which a setting's latency may exceed it")  # fmt: skip
    asking = commands.add_parser("predict", help="look up a setting in a table")
    asking.add_argument("file", type=Path, metavar="FILE", help="table that build wrote")
    asking.add_argument("--budget_ms", type=float, nargs="+", required=True, help="latency budgets in ms")
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Build a lookup or predict from one. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    given = build_parser().parse_args(argv)
    if given.command == "build":
        lookup = build(load_grid(given.results), given.aggregation_method, given.tolerance)
        save(lookup, given.output)
        print(f"saved {len(lookup.entries)} settings ({lookup.aggregation_method} latency) to {given.output}")
    else:
        lookup = load(given.file)
        for budget_ms in given.budget_ms:
            print(_line(lookup, budget_ms))


def _line(lookup: Lookup, budget_ms: float) -> str:
    entry = predict(lookup, budget_ms)
    word = "" if lookup.fits(entry, budget_ms) else "; no setting fits, this is the nearest"
    return (
        f"{budget_ms:g} ms: {entry.choice.key}, {lookup.aggregation_method} latency {lookup.latency_ms(entry):.1f} ms, "
        f"accuracy {entry.accuracy:.3f} of the best score{word}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
