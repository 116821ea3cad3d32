"""A lookup table of the best measured setting for a budget, kept in a small file. Also a command.

knobprof controller lookup build RESULTS_DIR --output lookup.json
knobprof controller lookup predict lookup.json --budget_ms 120
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from operator import ne
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Literal, NotRequired, get_args

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from scipy.special import betaincinv, stdtrit
from typing_extensions import TypedDict

from experiment_core_utils.config.command import reporting_errors, run_command
from experiment_core_utils.config.command_line import OneLineParser, add_knob_module
from experiment_core_utils.config.parts import QuestionConfig, validated_as
from experiment_core_utils.knobs.setting import Setting, setting_of
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import check_writable, write_json_atomically
from experiment_core_utils.primitives.replication import IN_ROUNDS
from experiment_core_utils.primitives.statistics import fraction_above, percentiles_over_runs
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import check_at_least, check_fraction, milliseconds
from experiment_core_utils.records.json_record import Amount, Count, Share, Time
from experiment_core_utils.records.price_list import PriceList
from experiment_core_utils.records.result_files import field_fault, read_object_of_kind
from experiment_core_utils.records.sample_result import DecoderKnobValues
from experiment_core_utils.records.setting_result import VisionKnob
from experiments.analyses.knobs.conclusion import invalid_lines
from experiments.analyses.knobs.grid import KnobPoint, TaskGrid
from experiments.analyses.knobs.prices import price_list
from experiments.controller.measured_grid import MeasuredGrid, load_grid
from experiments.controller.policies.interface import DRAWS, RequestFeatures, check_budget, draw_of
from experiments.controller.policies.prompt_words import PromptWords
from experiments.controller.policies.shared_budget import Price, price_of

SCHEMA_VERSION = 1
KIND = "lookup_policy"
Aggregation = Literal["mean", "median", "max_accuracy", "p50", "p95", "p99", "in_time", "few_knobs", "stream"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
DEFAULT_AGGREGATION: Aggregation = "few_knobs"
# Those by which a late answer counts 0.
BY_SCORE_IN_TIME: tuple[Aggregation, ...] = ("in_time", "few_knobs")
PERCENTS: Mapping[Aggregation, float] = {"median": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
CONFIDENCE = 0.95
# Budgets whose settings are kept, with their prompts where these count.
KEPT_BUDGETS = 1024
LOOKUP_FLAGS = ("aggregation_method", "tolerance", "max_late", "confidence", "neighbourhood")


class LookupEntry(VisionKnob, DecoderKnobValues):
    """A measured setting, over the samples that it was measured on."""

    accuracy: Share  #: mean of score / best score over the samples that have a score
    num_scored: Count
    #: latency_mean_ms, latency_median_ms: of `T_total` over all runs of the samples that were measured
    latency_mean_ms: Time
    latency_median_ms: Time
    num_measured: Count
    #: latencies_ms, scores: of each sample of the table, mean `T_total` of its runs and score / best score; None where
    #: it has none
    latencies_ms: tuple[Time | None, ...]
    scores: tuple[Share | None, ...]
    knobs: dict[str, str | int | float]  #: see `SettingResult.knobs`
    #: the `latencies_ms` of each run; () for one run
    runs_ms: tuple[tuple[Time | None, ...], ...] = ()

    @cached_property
    def choice(self) -> Setting:
        """The setting."""
        return setting_of(self)


@with_config(ConfigDict(strict=True))
class _StoredLookup(TypedDict):
    aggregation_method: Aggregation
    tolerance: Amount
    max_late: Share | None
    confidence: Share
    neighbourhood: Share | None
    prompts: tuple[str | None, ...]
    entries: Annotated[tuple[LookupEntry, ...], Field(min_length=1)]
    sample_ids: dict[str, tuple[Count, ...]]
    source: dict[str, Any]
    reference_ms: Time | None
    voided_by: tuple[str, ...]
    pictures: NotRequired[tuple[str, ...]]
    reference: NotRequired[str | None]


_STORED = TypeAdapter(_StoredLookup)


@dataclass(frozen=True)
class LookupOptions:
    """What a lookup goes by.

    `aggregation_method` is what a setting's latency is, which has to be at most budget x (1 + tolerance):

    - `mean` over its samples, `p50` (or `median`), `p95`, `p99`: percentiles over all of their runs,
    - `max_accuracy`: the smaller of mean and median, so that the most accurate setting that fits by either is taken.

    Of those that fit the most accurate one is taken, of equally accurate ones the one of the lowest latency. Where none
    fits, the fastest, which is the nearest to the budget.

    - `in_time` takes the setting of the highest mean score where a late run counts 0, of equal ones the one of the
      lowest mean latency. A setting fits where it has any run in time.
    - `few_knobs` does so among the settings that turn at most one knob from the highest value that the table has of it.
      One that turns more fits only where its score in time is surely above that of the best of these: of many settings
      the best one is so by luck, in part, and does worse on other requests.
    - `stream` lets requests share the budget: their mean latency has to be within it, or, with `max_late`, no more than
      that fraction may be late. Each takes the setting with the highest accuracy less a price of its expected cost; at
      most two such prices are mixed, so that the samples of the table cost the limit.

    Raises:
        ConfigurationError: a value that is not possible.
    """

    aggregation_method: Aggregation = DEFAULT_AGGREGATION
    tolerance: float = 0.0  #: fraction of the budget by which a latency may be above it; 0.05 is five percent
    #: a setting fits only where the chance that a request is late is at most this, with the `confidence`; None asks for
    #: nothing; see `late_limit`
    max_late: float | None = None
    confidence: float = CONFIDENCE
    #: fraction of the samples, those with the prompts most like the request's, that a request's table is made of, and
    #: all that are as like as the last of these; None for one table for all requests
    neighbourhood: float | None = None

    def __post_init__(self) -> None:
        if self.aggregation_method not in AGGREGATIONS:
            raise ConfigurationError(
                f"--aggregation_method {self.aggregation_method!r} is unknown; choose among {', '.join(AGGREGATIONS)}"
            )
        check_at_least("--tolerance", self.tolerance, 0.0)
        for name in ("max_late", "confidence", "neighbourhood"):
            value = getattr(self, name)
            if value is not None:
                check_fraction(f"--{name}", value)
        if self.aggregation_method == "stream" and self.confidence != CONFIDENCE:
            raise ConfigurationError("--confidence is of single requests, not of a stream; drop it")

    @property
    def name(self) -> str:
        """The name of such a policy, such as `lookup_p95` or `prompts_in_time_late0.05`."""
        kind = "lookup" if self.neighbourhood is None else "prompts"
        late = "" if self.max_late is None else f"_late{self.max_late:g}"
        return f"{kind}_{self.aggregation_method}{late}"


@dataclass(frozen=True)
class _Table:
    """The figures of S settings over some samples, at a budget."""

    accuracy: np.ndarray  #: [S], what is to be highest
    latency_ms: np.ndarray  #: [S], by the method; of a score in time the mean
    fits: np.ndarray  #: [S]


@dataclass(frozen=True)
class Lookup:
    """The table of measured settings that `predict` reads."""

    options: LookupOptions
    entries: tuple[LookupEntry, ...]  #: in order of the knobs, as the grid has them
    sample_ids: Mapping[str, tuple[int, ...]]  #: task -> the samples that the entries are based on
    source: Mapping[str, Any]  #: provenance of the results
    prompts: tuple[str | None, ...] = ()  #: of each sample, where there is a neighbourhood
    reference_ms: float | None = None  #: mean `T_total` of the model as it is; None where it was not measured
    voided_by: tuple[str, ...] = ()  #: see `MeasuredGrid`
    pictures: tuple[str, ...] = ()  #: of each sample; empty in a file that was built before these were kept
    reference: str | None = None  #: key of the model as it is; None as `reference_ms`

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return self.options.name

    @cached_property
    def keys(self) -> frozenset[tuple[str, int]]:
        """Task and sample id of each sample."""
        return frozenset((task, sample_id) for task, ids in self.sample_ids.items() for sample_id in ids)

    @cached_property
    def typical_s(self) -> Mapping[Setting, float]:
        """Seconds that a request takes at each setting: the geometric mean of its samples."""
        known_ms = {entry.choice: [ms for ms in entry.latencies_ms if ms is not None] for entry in self.entries}
        return {choice: geometric_mean(times) / 1000 for choice, times in known_ms.items()}

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        """See `Policy.choose`; without a neighbourhood the choice is the same for every request."""
        mixed = self._mixture(1000 * budget_s, None if self.options.neighbourhood is None else request.prompt)
        draw = draw_of(request, budget_s) / DRAWS
        for entry, fraction in mixed:
            if draw < fraction:
                return entry.choice
            draw -= fraction
        return mixed[-1][0].choice

    def mixture(self, budget_ms: float, prompt: str | None = None) -> tuple[tuple[LookupEntry, float], ...]:
        """The settings that such requests get, and the fraction of them that gets each: one of all, but in a stream."""
        if self.options.aggregation_method != "stream":
            return ((predict(self, budget_ms, prompt), 1.0),)
        check_budget(budget_ms / 1000)
        gains, costs = self._expected(budget_ms, self._places(prompt))
        return tuple((self.entries[at], share) for at, share in self._price(budget_ms).shares(gains, costs).items())

    @cached_property
    def _mixture(self) -> Callable[[float, str | None], tuple[tuple[LookupEntry, float], ...]]:
        return lru_cache(KEPT_BUDGETS)(self.mixture)

    def _places(self, prompt: str | None) -> np.ndarray:
        """Places of the samples that a request's table is made of."""
        if self.options.neighbourhood is None:
            return np.arange(self._latencies.shape[1])
        return self._words.nearest(prompt or "", self.options.neighbourhood)

    def _expected(self, budget_ms: float, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy [S] and cost [S], seconds or lateness, expected from samples."""
        return _means(self._scores[:, places]), -_means(-self._costs(budget_ms)[:, places])

    def _costs(self, budget_ms: float) -> np.ndarray:
        """Milliseconds [S, N]; with `max_late` the fraction of each sample's runs that are late."""
        if self.options.max_late is None:
            return self._latencies
        return fraction_above(self._runs, self.limit_ms(budget_ms))

    def _price(self, budget_ms: float) -> Price:
        if budget_ms not in self._prices:
            gains, costs, measured = self._requests(budget_ms)
            self._prices[budget_ms] = price_of(gains, costs, measured, self._stream_limit(budget_ms))
        return self._prices[budget_ms]

    def stream_cost(self, budget_ms: float) -> tuple[float, float]:
        """What a stream of the table's requests costs in the mean, and its limit: ms, with `max_late` lateness."""
        price, rows = self._price(budget_ms), zip(*self._requests(budget_ms), strict=True)
        costs = [
            sum(share * own[at] for at, share in price.shares(gains, expected).items()) for gains, expected, own in rows
        ]
        return float(np.mean(costs)), self._stream_limit(budget_ms)

    def _requests(self, budget_ms: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Expected accuracy, expected cost and measured cost [N, S] of the samples that every setting has a time of."""
        known = np.flatnonzero(np.isfinite(self._latencies).all(axis=0))
        prompts = self.prompts or (None,) * self._latencies.shape[1]
        expected = [self._expected(budget_ms, self._places(prompts[at])) for at in known]
        gains, costs = (np.array(each) for each in zip(*expected, strict=True))
        return gains, costs, self._costs(budget_ms)[:, known].T

    def _stream_limit(self, budget_ms: float) -> float:
        """The limit of a stream's mean cost."""
        return self.limit_ms(budget_ms) if self.options.max_late is None else self.options.max_late

    @cached_property
    def _prices(self) -> dict[float, Price]:
        return {}

    def limit_ms(self, budget_ms: float) -> float:
        """The latency that is in time."""
        return budget_ms * (1 + self.options.tolerance)

    def at(self, budget_ms: float, prompt: str | None = None) -> _Table:
        """The figures of all settings at a budget, for a prompt where there is a neighbourhood."""
        limit_ms, options = self.limit_ms(budget_ms), self.options
        places = self._places(prompt)
        runs, scores = self._runs[:, :, places], self._scores[:, places]
        latency_ms, accuracy = _over_rows(runs, options.aggregation_method), _means(scores)
        fits, late = np.asarray(latency_ms <= limit_ms), fraction_above(runs, limit_ms)
        if options.aggregation_method in BY_SCORE_IN_TIME:
            accuracy, fits = _means(scores * (1 - late)), np.asarray((late < 1).any(axis=1))
        if options.max_late is not None:
            limits = late_limit(np.nansum(late, axis=1), np.isfinite(late).sum(axis=1), options.confidence)
            fits = np.asarray(fits & (limits <= options.max_late))
        if options.aggregation_method == "few_knobs" and (few := fits & self._turns_one_knob).any():
            best = np.lexsort((latency_ms, -accuracy, ~few))[0]
            in_time = scores * (1 - late)
            fits = few | np.asarray(fits & _surely_positive(in_time - in_time[best]))
        return _Table(accuracy, latency_ms, fits)

    @cached_property
    def _turns_one_knob(self) -> np.ndarray:
        """Whether each setting [S] turns at most one knob from the highest value of the table."""
        orders = [entry.choice.order for entry in self.entries]
        highest = [max(values) for values in zip(*orders, strict=True)]
        return np.array([sum(map(ne, own, highest)) <= 1 for own in orders])

    @cached_property
    def _latencies(self) -> np.ndarray:
        return np.array([entry.latencies_ms for entry in self.entries], dtype=float)

    @cached_property
    def _runs(self) -> np.ndarray:
        """The latencies [R, S, N] of every run."""
        runs = [entry.runs_ms or (entry.latencies_ms,) for entry in self.entries]
        return np.array(runs, dtype=float).swapaxes(0, 1)

    @cached_property
    def _scores(self) -> np.ndarray:
        return np.array([entry.scores for entry in self.entries], dtype=float)

    @cached_property
    def _words(self) -> PromptWords:
        return PromptWords([text or "" for text in self.prompts])


def _means(values: np.ndarray) -> np.ndarray:
    """Means [S] of the known values in [S, N]; -inf where there are none."""
    known = np.isfinite(values)
    return np.where(
        known.any(axis=1), np.where(known, values, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1), -np.inf
    )


def _surely_positive(values: np.ndarray) -> np.ndarray:
    """Whether the mean of each row [S, N] is above 0 with `CONFIDENCE`, two-sided, by Student's t; nan is left out."""
    known = np.isfinite(values)
    numbers, filled = np.maximum(known.sum(axis=1), 2), np.where(known, values, 0.0)
    means = filled.sum(axis=1) / numbers
    variances = (np.where(known, filled - means[:, None], 0.0) ** 2).sum(axis=1) / (numbers - 1) / numbers
    return np.asarray(means > stdtrit(numbers - 1, 0.5 + CONFIDENCE / 2) * np.sqrt(variances) + 1e-12)


def _over_rows(runs: np.ndarray, method: Aggregation) -> np.ndarray:
    """The latency [S] by a method of [R, S, N]; infinite where a setting has none."""
    found = np.full(runs.shape[1], np.inf)
    for row in np.flatnonzero(np.isfinite(runs).any(axis=(0, 2))):
        if method in PERCENTS:
            (found[row],) = percentiles_over_runs(runs[:, row], (PERCENTS[method],))
        else:
            known = np.isfinite(runs[:, row]).any(axis=0)
            found[row] = np.nanmean(runs[:, row, known], axis=0).mean()
    return np.minimum(found, _over_rows(runs, "median")) if method == "max_accuracy" else found


def late_limit(late: np.ndarray, measured: np.ndarray, confidence: float) -> np.ndarray:
    """The upper limit of the chance to be late, of `late` among `measured` requests, by Clopper and Pearson (1934).

    A request of which a part of the runs is late counts as that part. The limit is then that of a beta distribution,
    which has the mean and more spread than the distribution that Gaffke's bound is of (`bounded_mean_interval`).
    """
    in_time = measured - late
    return np.where(in_time > 0, betaincinv(late + 1.0, np.maximum(in_time, 1e-9), confidence), 1.0)


def build(
    grid: MeasuredGrid,
    aggregation_method: Aggregation = DEFAULT_AGGREGATION,
    tolerance: float = 0.0,
    *,
    max_late: float | None = None,
    confidence: float = CONFIDENCE,
    neighbourhood: float | None = None,
) -> Lookup:
    """A table of every choice of the grid that has a score and a time; each sample counts the same, whatever its task.

    Raises:
        ConfigurationError: see `LookupOptions`.
        ResultsError: no choice has both a score and a time, of one sample for a score in time, or there is a
            neighbourhood and no prompts.
    """
    options = LookupOptions(aggregation_method, tolerance, max_late, confidence, neighbourhood)
    fractions, total_ms, runs_ms = grid.shares, 1000 * grid.total_s, 1000 * grid.times_s
    entries = []
    for row, choice in enumerate(grid.choices):
        scored, measured = np.isfinite(fractions[row]), np.isfinite(total_ms[row])
        needs_both = aggregation_method in (*BY_SCORE_IN_TIME, "stream")
        if scored.any() and measured.any() and (not needs_both or (scored & measured).any()):
            entries.append(
                LookupEntry(
                    **choice.published_fields,
                    accuracy=float(fractions[row][scored].mean()),
                    num_scored=int(scored.sum()),
                    latency_mean_ms=float(total_ms[row][measured].mean()),
                    latency_median_ms=percentiles_over_runs(runs_ms[:, row], (50,))[0],
                    num_measured=int(measured.sum()),
                    latencies_ms=_known(total_ms[row]),
                    scores=_known(fractions[row]),
                    knobs=choice.levels,
                    runs_ms=() if len(runs_ms) < 2 else tuple(map(_known, runs_ms[:, row])),
                )
            )
    if not entries:
        raise ResultsError("no setting has samples with a score and samples with a time; measure some")
    prompts = () if neighbourhood is None else grid.prompts
    if prompts is None:
        raise ResultsError("--neighbourhood needs the prompts, which these results lack; profile again, or drop it")
    ids: dict[str, list[int]] = {}
    for task, sample_id in zip(grid.tasks, grid.sample_ids, strict=True):
        ids.setdefault(task, []).append(sample_id)
    by_task = {task: tuple(own) for task, own in ids.items()}
    reference_ms = milliseconds(grid.reference_mean_s)
    reference = None if grid.reference is None else grid.reference.key
    return Lookup(
        options, tuple(entries), by_task, grid.source, prompts, reference_ms, grid.voided_by, grid.pictures, reference
    )


def _known(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(float(value) if np.isfinite(value) else None for value in values)


def predict(lookup: Lookup, budget_ms: float, prompt: str | None = None) -> LookupEntry:
    """The best setting for a budget, in a stream the most frequent one; see `LookupOptions`.

    Args:
        prompt: of the request, which a neighbourhood is found by.

    Raises:
        ConfigurationError: a budget that is not above 0.
    """
    if lookup.options.aggregation_method == "stream":
        return max(lookup.mixture(budget_ms, prompt), key=lambda each: each[1])[0]
    check_budget(budget_ms / 1000)
    table = lookup.at(budget_ms, prompt)
    if not table.fits.any():
        return lookup.entries[int(np.argmin(table.latency_ms))]
    return lookup.entries[int(np.lexsort((table.latency_ms, -table.accuracy, ~table.fits))[0])]


def save(lookup: Lookup, path: Path) -> None:
    """Write the JSON file of docs/controller/evaluation.md; raises ResultsNotSaved where the disk refuses."""
    write_json_atomically(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            **asdict(lookup.options),
            "entries": [entry.model_dump() for entry in lookup.entries],
            "sample_ids": {task: list(ids) for task, ids in lookup.sample_ids.items()},
            "prompts": list(lookup.prompts),
            "source": dict(lookup.source),
            "reference_ms": lookup.reference_ms,
            "voided_by": list(lookup.voided_by),
            "pictures": list(lookup.pictures),
            "reference": lookup.reference,
        },
        path,
    )


def load(path: Path) -> Lookup:
    """The lookup that `save` wrote; raises ResultsError for any other file."""
    content = read_object_of_kind(path, KIND, SCHEMA_VERSION, "build it with knobprof controller lookup build")
    try:
        # From Python's objects a strict one is no record.
        stored = _STORED.validate_json(json.dumps(content))
    except ValidationError as error:
        raise ResultsError(f"{path} {field_fault(error)}; build it again") from error
    try:
        options = LookupOptions(**{name: content[name] for name in LOOKUP_FLAGS})
    except ConfigurationError as error:
        raise ResultsError(f"{path} is broken: {error}; build it again") from error
    try:
        _ = [entry.choice for entry in stored["entries"]]
    except ConfigurationError as error:
        raise ResultsError(f"{path}: {error}") from error
    found = Lookup(
        options, stored["entries"], stored["sample_ids"], stored["source"], stored["prompts"], stored["reference_ms"],
        stored["voided_by"], stored.get("pictures", ()), stored.get("reference"),
    )  # fmt: skip
    number = sum(len(ids) for ids in found.sample_ids.values())
    sizes = {len(own) for entry in found.entries for own in (entry.latencies_ms, entry.scores, *entry.runs_ms)}
    if found.options.neighbourhood is not None:
        sizes.add(len(found.prompts))
    if len({len(each.runs_ms) for each in found.entries}) > 1:
        raise ResultsError(f"{path} is broken: entries have different numbers of runs; build it again")
    if sizes != {number}:
        raise ResultsError(f"{path} is broken: entries have {sorted(sizes)} samples, not {number}; build it again")
    return found


def add_lookup_flags(parser: argparse._ActionsContainer, named: str = "") -> None:
    """Add the flags that say what a lookup goes by; None says that one was not given.

    Args:
        named: before each help text.
    """
    default = LookupOptions()
    add = parser.add_argument
    add("--aggregation_method", choices=AGGREGATIONS,
        help=f"{named}what a setting is compared by: a latency over its samples, or its score within the budget "
             f"(default: {default.aggregation_method})")  # fmt: skip
    add("--tolerance", type=float, metavar="FRACTION",
        help=f"{named}fraction of the budget by which a setting's latency may exceed it (default: "
             f"{default.tolerance:g})")  # fmt: skip
    add("--max_late", type=float, metavar="FRACTION",
        help=f"{named}only settings whose chance of being late is at most this (default: any)")  # fmt: skip
    add("--confidence", type=float, metavar="FRACTION",
        help=f"{named}confidence with which --max_late must hold (default: {default.confidence:g})")  # fmt: skip
    add("--neighbourhood", type=float, metavar="FRACTION",
        help=f"{named}fraction of the samples, those with prompts most like the request's, that its table is made of "
             "(default: one table of all)")  # fmt: skip


def built_by_flags(flags: argparse.Namespace, grid: MeasuredGrid) -> Lookup:
    """The lookup of a grid that the flags of `add_lookup_flags` describe; see `build`."""
    if flags.confidence is not None and flags.max_late is None:
        raise ConfigurationError(f"--confidence {flags.confidence:g} is of --max_late FRACTION; give one, or drop it")
    named = {name: value for name in LOOKUP_FLAGS if (value := getattr(flags, name)) is not None}
    return build(grid, **named)


def build_parser() -> argparse.ArgumentParser:
    """The flags of both commands."""
    parser = OneLineParser(
        prog="experiments.controller.lookup",
        description="Find the best setting for a budget.",
        examples=(
            "knobprof controller lookup build results/core_exp --output lookup.json",
            "knobprof controller lookup predict lookup.json --budget_ms 100 200",
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="build a table from results")
    making.add_argument("results", type=Path, nargs="+", metavar="RESULTS",
                        help="--output_dir of a run (several: one sweep), or tables of a full grid")  # fmt: skip
    making.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file for the table")
    add_lookup_flags(making)
    asking = commands.add_parser("predict", help="answer budgets from a table, as knobprof choose does from results")
    asking.add_argument("file", type=Path, metavar="FILE", help="table that build wrote")
    asking.add_argument("--budget_ms", type=float, nargs="+", required=True, metavar="MS", help="latency budgets")
    asking.add_argument("--prompt", metavar="TEXT", help="of the request, for a table built with --neighbourhood")
    for command in (making, asking):
        add_knob_module(command)
    return parser


@reporting_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Build a lookup or predict from one. Exit code: 0 done, 1 the files do not allow it, 2 a flag is wrong."""
    flags = build_parser().parse_args(argv)
    if flags.command == "build":
        check_writable(flags.output)
        lookup = built_by_flags(flags, load_grid(flags.results))
        save(lookup, flags.output)
        reference = "the reference was not measured"
        if lookup.reference_ms is not None:
            reference = f"the reference, the model as it is, takes {lookup.reference_ms:.1f} ms"
        built = f"{flags.output}: {counted(len(lookup.entries), 'setting')}, {lookup.name}; {reference}"
        print("\n".join([*invalid_lines(lookup.voided_by), built]))
        return
    lookup = load(flags.file)
    if (flags.prompt is None) == (lookup.options.neighbourhood is not None):
        raise ConfigurationError(
            f"--prompt TEXT goes with a table built with --neighbourhood, and {flags.file} is of {lookup.name}"
        )
    lines = invalid_lines(lookup.voided_by)
    for budget_ms in flags.budget_ms:
        lines += [] if lookup.voided_by else _prices(lookup, budget_ms, flags.file).lines
        lines.append(_choice_line(lookup, budget_ms, flags.prompt))
    print("\n".join(lines))


def _prices(lookup: Lookup, budget_ms: float, path: Path) -> PriceList:
    """What `knobprof choose` answers of the samples of the table."""
    if not lookup.pictures:
        raise ResultsError(f"{path} does not say which samples are of one picture; build it again")
    statistic = "budget_p95_ms" if lookup.options.aggregation_method in ("p95", "p99") else "budget_ms"
    question = validated_as(QuestionConfig, {statistic: lookup.limit_ms(budget_ms)}, lambda _: "--budget_ms")
    return price_list(_task_grid(lookup), question)


def _task_grid(lookup: Lookup) -> TaskGrid:
    """The grid that the table was built from; only budgets are asked of it, which are of one setting each."""
    total_ms, keys = lookup._latencies, [entry.choice.key for entry in lookup.entries]
    absent = np.full(total_ms.shape, np.nan)
    return TaskGrid(
        task=", ".join(lookup.sample_ids),
        metric="fraction of the best score",
        best=1.0,
        points=tuple(
            KnobPoint(key, entry.choice, is_reference=key == lookup.reference)
            for key, entry in zip(keys, lookup.entries, strict=True)
        ),
        sample_ids=tuple(range(total_ms.shape[1])),
        pictures=lookup.pictures,
        scores=lookup._scores,
        total_ms=total_ms,
        energy_j=absent,
        flops=absent,
        log_times=np.log(total_ms),
        times=IN_ROUNDS,
        question_types=tuple(task for task, ids in lookup.sample_ids.items() for _ in ids),
    )


def _choice_line(lookup: Lookup, budget_ms: float, prompt: str | None) -> str:
    """What a controller with this table gives a request, or the requests of a stream."""
    mixed = lookup.mixture(budget_ms, prompt)
    spent = ""
    if lookup.options.aggregation_method == "stream":
        cost, limit = lookup.stream_cost(budget_ms)
        # What is over by the mixture's rounding is within it.
        fits = cost <= limit * (1 + 1e-6)
        late = lookup.options.max_late is not None
        spent = f"; {100 * cost:.1f} % of the stream late" if late else f"; {cost:.1f} ms by mean over the stream"
    else:
        fits = bool(lookup.at(budget_ms, prompt).fits[lookup.entries.index(mixed[0][0])])
    settings = ", ".join(f"{100 * share:.0f} % {entry.choice.key}" for entry, share in mixed)
    return f"a controller by {lookup.name}: {settings}{spent}{'' if fits else '; none fits, this is the nearest'}"


if __name__ == "__main__":
    sys.exit(run_command(main))
