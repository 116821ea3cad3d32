"""Requests and measured samples as columns, the terms of the latency model, and the checks of both.

The terms are those of experts and blocks, so columns name both knobs. A knob that changes the tokens is known by those
that were counted; any other is unknown to the model, and `unknown_knobs` says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import pandas as pd

from experiment_core_utils.knobs.interface import Knob, Level
from experiment_core_utils.knobs.registry import all_knobs
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.limits import MOST_FITTED, MOST_SETTINGS

STAGES = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token")
MEASURED = (*STAGES, "T_total")
# What stands for `top_k` in the columns of a model without experts.
DENSE_EXPERTS = 1
# A column of which less than this fraction is its own is a sum of others, except for rounding.
_OWN_FRACTION = 1e-9


@dataclass(frozen=True)
class RequestSetting:
    """One request at one setting of the knobs."""

    vision_tokens: int  #: image features that enter the language model; 0 without a picture
    crops: int  #: crops of the picture, without the overview; 0 without a picture
    text_tokens: int  #: of the prompt, without image features and image markers
    #: level of each knob by name, as results have it; those that have a column count, and without experts there is none
    knobs: Mapping[str, Level]
    output_tokens: float | None = None  #: of the answer, true or expected, at least 1; None where it is not known


@dataclass(frozen=True)
class RequestColumns:
    """Columns of S requests, each an array [S] of floats; meanings as in RequestSetting and, of a knob, its levels."""

    vision_tokens: np.ndarray
    crops: np.ndarray
    text_tokens: np.ndarray
    top_k: np.ndarray
    num_active_blocks: np.ndarray
    output_tokens: np.ndarray  #: NaN where it is not known

    def __post_init__(self) -> None:
        """Broadcasts scalars and validates the values.

        Raises:
            ConfigurationError: a value below what is possible, not finite, or columns of different lengths.
        """
        given = [np.atleast_1d(np.asarray(getattr(self, each.name), dtype=np.float64)) for each in fields(self)]
        try:
            columns = np.broadcast_arrays(*given)
        except ValueError as error:
            lengths = ", ".join(f"{each.name} {column.shape}" for each, column in zip(fields(self), given, strict=True))
            raise ConfigurationError(f"columns of different lengths: {lengths}; give one value a request") from error
        for each, column in zip(fields(self), columns, strict=True):
            least = 1 if each.name in (*COLUMN_KNOBS, "output_tokens") else 0
            wrong = column[~(np.isfinite(column) & (column >= least))]
            if each.name == "output_tokens":
                wrong = wrong[~np.isnan(wrong)]
            if wrong.size:
                raise ConfigurationError(f"{each.name} {wrong[0]:g} is not possible; give a number from {least}")
            object.__setattr__(self, each.name, column)

    def __len__(self) -> int:
        return len(self.text_tokens)

    @property
    def prompt_tokens(self) -> np.ndarray:
        """Vision and text tokens; the few markers between image features are not counted."""
        return self.vision_tokens + self.text_tokens

    @property
    def context(self) -> np.ndarray:
        """Mean tokens in the cache over the decode steps; that of the first step where the length is not known."""
        return self.prompt_tokens + np.where(np.isnan(self.output_tokens), 2.0, self.output_tokens) / 2

    def take(self, which: np.ndarray) -> Self:
        """The rows of a mask or an array of indices."""
        return type(self)(*(getattr(self, each.name)[which] for each in fields(self)))


# The knobs that have a column of their levels.
COLUMN_KNOBS = tuple(knob.name for knob in all_knobs() if knob.name in {each.name for each in fields(RequestColumns)})
# Of a request, the columns that a sweep changes at will, each of which has its range.
KNOBS = ("crops", *COLUMN_KNOBS)


def requests_of(settings: Sequence[RequestSetting]) -> RequestColumns:
    """The columns of rows; raises ConfigurationError as RequestColumns does, and for a level that is not given."""
    rows = [{TOP_K.name: DENSE_EXPERTS, **row.knobs, **vars(row)} for row in settings]
    columns = {}
    for name in (each.name for each in fields(RequestColumns)):
        if any(name not in row for row in rows):
            raise ConfigurationError(f"the knobs of a request lack {name}; give its level, as results have it")
        columns[name] = np.array([row[name] for row in rows], dtype=np.float64)
    return RequestColumns(**columns)


@dataclass(frozen=True)
class TimedSamples:
    """The columns of S measured samples."""

    requests: RequestColumns
    times: Mapping[str, np.ndarray]  #: name of MEASURED -> [S] milliseconds; NaN where the sample has no such stage
    settings: np.ndarray  #: [S], "<task> <setting of the knobs>" that the sample was measured at
    tasks: np.ndarray  #: [S], names the task
    #: name of a knob, and `pictures` -> [S], the level or the picture
    wholes: Mapping[str, np.ndarray] = field(default_factory=dict)
    #: name of MEASURED -> [R, S] milliseconds of every run; NaN where a sample has fewer than R; empty if not known
    runs: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def run_totals(self) -> np.ndarray:
        """`T_total` [R, S] of every run, NaN where a sample has fewer; of the sample where its runs are not known."""
        return self.runs["T_total"] if self.runs else self.times["T_total"][None]

    @property
    def knobs(self) -> np.ndarray:
        """The setting [S] of each sample without the task; samples of one setting are left out of a fit together."""
        return np.array([str(setting).partition(" ")[2] for setting in self.settings])

    def take(self, which: np.ndarray) -> "TimedSamples":
        """The rows of a mask or an array of indices."""
        times, wholes, runs = (
            {name: column[..., which] for name, column in each.items()} for each in (self.times, self.wholes, self.runs)
        )
        return TimedSamples(self.requests.take(which), times, self.settings[which], self.tasks[which], wholes, runs)


def timed_samples(frame: pd.DataFrame, runs: pd.DataFrame | None = None) -> TimedSamples:
    """The samples that were measured, from the frame of `sweeps.samples_frame`, with those of `sweeps.runs_frame`.

    Samples that were only answered (no times) are left out; those without a picture have 0 image features and 0 crops.
    The feed-forward part of a dense model counts as one expert that every token takes.

    Raises:
        ResultsError: no sample has times, or one has a time that is not positive.
    """
    frame = frame[frame["T_total_ms"].notna()]
    if frame.empty:
        raise ResultsError("no sample of these results has times; profile with --num_latency_samples 1 or more")
    frame = frame[frame["T_LLM_prefill_ms"].notna()]
    if frame.empty:
        raise ResultsError("a server measured these results, and shows no stages; profile a model in this process")
    requests = RequestColumns(
        vision_tokens=frame["actual_vision_tokens"].to_numpy(np.float64),
        crops=frame["actual_num_crops"].fillna(0).to_numpy(np.float64),
        text_tokens=frame["input_text_tokens"].to_numpy(np.float64),
        top_k=frame["top_k"].fillna(DENSE_EXPERTS).to_numpy(np.float64),
        num_active_blocks=frame["num_active_blocks"].to_numpy(np.float64),
        output_tokens=frame["output_tokens"].to_numpy(np.float64),
    )
    times = {name: frame[f"{name}_ms"].to_numpy(np.float64) for name in MEASURED}
    for name, column in times.items():
        if (column <= 0).any():
            raise ResultsError(f"{name} is {column[column <= 0][0]:g} ms in a sample; times are above 0, measure again")
    tasks = frame["task"].to_numpy(str)
    settings = np.array([f"{task} {key}" for task, key in zip(tasks, frame["setting"], strict=True)])
    levels = {knob.name: _levels(frame[knob.name]) for knob in all_knobs() if knob.name in frame}
    pictures = frame["image_id"].fillna(frame["sample_id"].astype(str)).to_numpy(str)
    of_runs = {}
    if runs is not None:
        table = runs.set_index(["run", "sample"])
        of_runs = {name: table[f"{name}_ms"].unstack().reindex(columns=frame.index).to_numpy() for name in MEASURED}
    return TimedSamples(requests, times, settings, tasks, levels | {"pictures": pictures}, of_runs)


# Name of `TimedSamples.wholes` that has the number of the run, where there are several.
RUNS = "runs"


def of_several_runs(parts: Sequence[TimedSamples]) -> TimedSamples:
    """The samples of several runs as one: their settings are told apart, and left out of a fit together.

    `wholes` has the number of the run, from 1, as RUNS; a knob that one of the runs does not name is not in it.
    """
    numbers = [str(number) for number, part in enumerate(parts, start=1) for _ in range(len(part))]
    shared = [name for name in parts[0].wholes if all(name in part.wholes for part in parts)]
    most = max(len(part.runs[name]) for part in parts for name in MEASURED) if all(part.runs for part in parts) else 0

    def padded(runs: np.ndarray) -> np.ndarray:
        return np.pad(runs, ((0, most - len(runs)), (0, 0)), constant_values=np.nan)

    return TimedSamples(
        RequestColumns(
            *(np.concatenate([getattr(part.requests, each.name) for part in parts]) for each in fields(RequestColumns))
        ),
        {name: np.concatenate([part.times[name] for part in parts]) for name in MEASURED},
        np.array([f"{number}:{setting}" for number, setting in zip(numbers, _joined(parts, "settings"), strict=True)]),
        _joined(parts, "tasks"),
        {name: np.concatenate([part.wholes[name] for part in parts]) for name in shared} | {RUNS: np.array(numbers)},
        {name: np.concatenate([padded(part.runs[name]) for part in parts], axis=1) for name in MEASURED if most},
    )


def _joined(parts: Sequence[TimedSamples], name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in parts])


def _levels(column: pd.Series) -> np.ndarray:
    """The levels of a knob, numbers as such, NaN in a model that lacks it."""
    return column.to_numpy(np.float64 if pd.api.types.is_numeric_dtype(column) else str)


def lacked_knobs(samples: TimedSamples) -> list[str]:
    """The knobs that no sample has a level of."""
    return [name for name, levels in samples.wholes.items() if levels.dtype.kind == "f" and np.isnan(levels).all()]


def unknown_knobs(samples: TimedSamples) -> dict[str, int]:
    """The knobs that varied and that no term knows, by title, with their numbers of values."""
    knobs: list[Knob[Any]] = [knob for knob in all_knobs() if not knob.changes_tokens and knob.name not in KNOBS]
    counts = {knob.title: len(np.unique(samples.wholes[knob.name])) for knob in knobs if knob.name in samples.wholes}
    return {title: count for title, count in counts.items() if count > 1}


def of_fewer_settings(samples: TimedSamples, most: int = MOST_FITTED) -> tuple[TimedSamples, AnalysisCaveat | None]:
    """The samples, of MOST_FITTED settings where there are more than MOST_SETTINGS, and the caveat of that.

    A fit has a dozen coefficients: more settings cost time and change nothing that can be seen.
    """
    names = np.unique(samples.knobs)
    if len(names) <= MOST_SETTINGS:
        return samples, None
    chosen = np.random.default_rng(0).choice(names, size=most, replace=False)
    left_out = AnalysisCaveat.of("part_of_settings", num_fitted=most, num_settings=len(names))
    return samples.take(np.isin(samples.knobs, chosen)), left_out


def _later_experts(requests: RequestColumns) -> np.ndarray:
    return (requests.num_active_blocks - 1) * requests.top_k


# What a stage's time may be a sum of, each times a coefficient that is not negative: so no time is, and none falls
# when a knob or a length goes up. The first block keeps its own number of experts, which is in the terms of blocks.
TERMS: Mapping[str, Callable[[RequestColumns], np.ndarray]] = {
    "request": lambda of: np.ones(len(of)),
    "image_crops": lambda of: of.crops + 1,
    "blocks": lambda of: of.num_active_blocks,
    "tokens": lambda of: of.prompt_tokens,
    "experts": _later_experts,
    "blocks_x_tokens": lambda of: of.num_active_blocks * of.prompt_tokens,
    "experts_x_tokens": lambda of: _later_experts(of) * of.prompt_tokens,
    "blocks_x_tokens_squared": lambda of: of.num_active_blocks * of.prompt_tokens**2,
    "blocks_x_context": lambda of: of.num_active_blocks * of.context,
}


def columns_of(terms: Sequence[str], requests: RequestColumns) -> np.ndarray:
    """The terms' values [S, terms] of requests."""
    return np.stack([TERMS[name](requests) for name in terms], axis=1)


def identifiable(terms: Sequence[str], requests: RequestColumns) -> tuple[str, ...]:
    """The terms that these requests can distinguish: one that is a sum of multiples of earlier ones is left out."""
    kept: list[str] = []
    basis: list[np.ndarray] = []
    for name in terms:
        rest = TERMS[name](requests)
        length = np.linalg.norm(rest)
        for _ in range(2):  # once more, for what rounding left in
            for direction in basis:
                rest = rest - (direction @ rest) * direction
        own = np.linalg.norm(rest)
        if own > _OWN_FRACTION * length:
            kept.append(name)
            basis.append(rest / own)
    return tuple(kept)
