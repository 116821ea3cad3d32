"""The stages' fractions of the time by regime, and which stage is the longest where.

A generation of N tokens contains the shorter ones: its first n tokens came as they come in a generation of n. So one
run gives the stages of every output length up to its own, as measured, without a model of decode.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

import numpy as np

from experiment_core_utils.knobs.interface import Level
from experiment_core_utils.records.stages import STAGES
from experiments.fitting.intervals import ratio_intervals

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Generation:
    """One sample, its times the means of its runs."""

    #: task, setting: whose
    task: str
    setting: str
    vision: str  #: label of the vision knob: `low`, `1008 tokens`, or `no picture`
    levels: Mapping[str, Level]  #: by knob, without those that the model lacks
    picture: Hashable  #: name of the picture, unique among tasks; samples of the same one are not independent
    image_features: int | None  #: that the vision stage computed; None without a picture
    prompt_tokens: int
    vision_ms: float | None  #: None without a picture
    prefill_ms: float
    #: mean time of each decode step; one that some runs lack counts as 0 there, so that steps add up
    inter_token_ms: tuple[float, ...]
    sample_id: int = 0  #: in its task

    @property
    def total_ms(self) -> float:
        """Of all stages."""
        return sum(self.stages_ms(self.output_tokens))

    @property
    def output_tokens(self) -> int:
        """The number of tokens that were generated."""
        return len(self.inter_token_ms) + 1

    def stages_ms(self, output_tokens: int) -> tuple[float, float, float]:
        """Vision, prefill, decode of its first so many tokens; no picture is 0 ms of vision, one token 0 of decode."""
        return self.vision_ms or 0.0, self.prefill_ms, self.decode_ms[min(output_tokens, self.output_tokens) - 1]

    @cached_property
    def decode_ms(self) -> tuple[float, ...]:
        """Time of decode up to each token, 0 for the first."""
        return tuple(accumulate(self.inter_token_ms, initial=0.0))


@dataclass(frozen=True)
class StageFraction:
    """A stage in a regime: mean time, fraction of the summed total (with 95 % interval), where it is longest."""

    mean_ms: float
    share: float
    share_ci95: tuple[float, float] | None  #: percentile bootstrap over pictures; None for a single picture
    dominates_share: float  #: fraction of generations in which it takes longest


@dataclass(frozen=True)
class Regime:
    """The generations of one task with the same vision knob (and setting, where one is named) and output length."""

    task: str
    vision: str
    setting: str | None  #: None where the regime pools all settings of the vision knob
    output_tokens: int | None  #: None where each generation counts with its own length
    n: int  #: generations in it; those that ended before `output_tokens` are not
    num_pictures: int  #: they are of
    num_shorter: int  #: generations left out because they ended before
    total_ms: float
    stages: dict[str, StageFraction]
    dominant: str  #: the stage with the largest fraction


def regimes_of(groups: Iterable[tuple[Sequence[Generation], int | None, str | None]]) -> list[Regime]:
    """The regime of each (generations, output tokens, setting) with any so long, all intervals computed together."""
    found, sums = [], []
    for generations, length, setting in groups:
        long = [each for each in generations if length is None or each.output_tokens >= length]
        if not long:
            continue
        times = np.array([each.stages_ms(each.output_tokens if length is None else length) for each in long])
        sums.append(sums_by_cluster((*times.T, times.sum(axis=1)), [each.picture for each in long]))
        shares = times.sum(axis=0) / times.sum()
        longest = np.bincount(times.argmax(axis=1), minlength=len(STAGES)) / len(long)
        figures = zip(times.mean(axis=0).tolist(), shares.tolist(), longest.tolist(), strict=True)
        fractions = [StageFraction(mean_ms, share, None, often) for mean_ms, share, often in figures]
        found.append(
            Regime(
                task=long[0].task,
                vision=long[0].vision,
                setting=setting,
                output_tokens=length,
                n=len(long),
                num_pictures=len(sums[-1]),
                num_shorter=len(generations) - len(long),
                total_ms=float(times.sum(axis=1).mean()),
                stages=dict(zip(STAGES, fractions, strict=True)),
                dominant=STAGES[int(np.argmax(shares))],
            )
        )
    return [
        replace(each, stages={stage: replace(each.stages[stage], share_ci95=end) for stage, end in ends.items()})
        for each, ends in zip(found, _share_intervals(sums), strict=True)
    ]


def sums_by_cluster(columns: Sequence[np.ndarray], clusters: Sequence[Hashable]) -> np.ndarray:
    """[G, C], the sums of C columns over each of the clusters, in the order in which these are met."""
    numbers: dict[Hashable, int] = {}
    owners = [numbers.setdefault(each, len(numbers)) for each in clusters]
    return np.stack([np.bincount(owners, column, minlength=len(numbers)) for column in columns], axis=1)


def _share_intervals(sums: Sequence[np.ndarray]) -> list[dict[str, tuple[float, float] | None]]:
    """The interval of each stage's fraction, from [G, 4] sums by picture of stages and all; None for one picture."""
    found: list[dict[str, tuple[float, float] | None]] = [dict.fromkeys(STAGES) for _ in sums]
    # Those of as many pictures are drawn together.
    for size in sorted({len(each) for each in sums} - {1}):
        places = [place for place, each in enumerate(sums) if len(each) == size]
        columns = np.stack([sums[place].T for place in places])
        for number, stage in enumerate(STAGES):
            for place, ends in zip(places, ratio_intervals(columns[:, number], columns[:, -1]), strict=True):
                found[place][stage] = ends
    return found


def grouped(generations: Iterable[Generation], name: Callable[[Generation], Key]) -> dict[Key, list[Generation]]:
    """Items grouped by name, names in the order of their first occurrence."""
    groups: dict[Key, list[Generation]] = {}
    for each in generations:
        groups.setdefault(name(each), []).append(each)
    return groups


def regimes(generations: Sequence[Generation], lengths: Sequence[int | None]) -> list[Regime]:
    """The regime of each task and vision knob at each output length, settings pooled, in order of first occurrence."""
    groups = grouped(generations, lambda each: (each.task, each.vision))
    return regimes_of((group, length, None) for group in groups.values() for length in lengths)


def settings_fractions(generations: Sequence[Generation]) -> list[Regime]:
    """The regime of each setting, each generation with its own length."""
    groups = grouped(generations, lambda each: (each.task, each.setting))
    return regimes_of((group, None, setting) for (_, setting), group in groups.items())


def tokens_until_decode_is_half(generations: Sequence[Generation]) -> int | None:
    """The fewest output tokens from which decode takes at least as long as vision and prefill together, in the sums.

    Only generations that reach a length count for it; None where decode stays below half.
    """
    sums = summed_stages(generations)
    reached = np.flatnonzero(sums[:, 2] >= sums[:, 0] + sums[:, 1])
    return int(reached[0]) + 1 if len(reached) else None


def summed_stages(generations: Sequence[Generation]) -> np.ndarray:
    """[L, 3], the stages of the first 1, 2 ... L tokens, summed over the generations that have so many."""
    groups = grouped(generations, lambda each: each.output_tokens)
    sums = np.zeros((max(groups, default=0), len(STAGES)))
    for length, own in groups.items():
        sums[:length, :2] += np.sum([each.stages_ms(1)[:2] for each in own], axis=0)
        sums[:length, 2] += np.sum([each.decode_ms for each in own], axis=0)
    return sums


def display_lengths(generations: Sequence[Generation]) -> list[int]:
    """The lengths 1, 4, 16, 64 ... and the longest length that at least half of the generations reach."""
    lengths = sorted(each.output_tokens for each in generations)
    longest = lengths[len(lengths) // 2] if lengths else 0
    return [length for length in (1, 4, 16, 64, 256, 1024) if length < longest] + ([longest] if longest else [])
