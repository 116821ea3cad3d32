"""In: the stage times of single generations; out: shares of the stages by regime, and what dominates where. Pure.

A generation of N tokens holds the shorter ones: its first n tokens came as they come in a generation of n. So one run
gives the stages of every output length up to its own, as measured, without a model of decode.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from experiment_core_utils.models.interface import STAGES
from experiment_core_utils.primitives.distributions import bootstrap_interval, cluster_totals

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Generation:
    """One sample's published run.

    Attributes:
        task, setting: whose.
        vision: label of the vision knob: `low`, `1008 tokens`, or `no picture`.
        picture: name of the picture, unique among tasks; samples that share it are not independent.
        image_features: that the vision stage computed; None without a picture.
        vision_ms: None without a picture.
        inter_token_ms: time of each decode step.
    """

    task: str
    setting: str
    vision: str
    top_k: int | None
    num_active_blocks: int
    picture: Hashable
    image_features: int | None
    prompt_tokens: int
    vision_ms: float | None
    prefill_ms: float
    inter_token_ms: tuple[float, ...]

    @property
    def output_tokens(self) -> int:
        """How many were generated."""
        return len(self.inter_token_ms) + 1

    def stages_ms(self, output_tokens: int) -> tuple[float, float, float]:
        """Vision, prefill, decode of its first so many tokens; no picture is 0 ms of vision, one token 0 of decode."""
        return self.vision_ms or 0.0, self.prefill_ms, float(sum(self.inter_token_ms[: output_tokens - 1]))


@dataclass(frozen=True)
class StageFraction:
    """One stage in a regime: mean time, its share of the summed total (with 95 % interval), where it is the longest.

    Attributes:
        share_ci95: percentile bootstrap over pictures; None for a single picture.
        dominates_share: share of generations in which it takes longest.
    """

    mean_ms: float
    share: float
    share_ci95: tuple[float, float] | None
    dominates_share: float


@dataclass(frozen=True)
class Regime:
    """Generations of one task that have the vision knob (and setting, where one is named) and output length in common.

    Attributes:
        setting: None where the regime pools all settings of the vision knob.
        output_tokens: None where each generation counts with its own length.
        n: generations in it; those that ended before `output_tokens` are not.
        num_pictures: they are of.
        num_shorter: generations left out because they ended before.
        dominant: the stage with the largest share.
    """

    task: str
    vision: str
    setting: str | None
    output_tokens: int | None
    n: int
    num_pictures: int
    num_shorter: int
    total_ms: float
    stages: dict[str, StageFraction]
    dominant: str


def regime_of(generations: Sequence[Generation], output_tokens: int | None, setting: str | None) -> Regime | None:
    """The shares over generations of one task and vision knob; None where none is as long as `output_tokens`."""
    long = [each for each in generations if output_tokens is None or each.output_tokens >= output_tokens]
    if not long:
        return None
    times = np.array([each.stages_ms(each.output_tokens if output_tokens is None else output_tokens) for each in long])
    pictures = [each.picture for each in long]
    fractions = [_share(times, stage, pictures) for stage in range(len(STAGES))]
    return Regime(
        task=long[0].task,
        vision=long[0].vision,
        setting=setting,
        output_tokens=output_tokens,
        n=len(long),
        num_pictures=len(set(pictures)),
        num_shorter=len(generations) - len(long),
        total_ms=float(times.sum(axis=1).mean()),
        stages=dict(zip(STAGES, fractions, strict=True)),
        dominant=STAGES[int(np.argmax([each.share for each in fractions]))],
    )


def _share(times: np.ndarray, stage: int, pictures: Sequence[Hashable]) -> StageFraction:
    own, all_stages = times[:, stage], times.sum(axis=1)
    sums, totals = cluster_totals(own, pictures)[0], cluster_totals(all_stages, pictures)[0]
    return StageFraction(
        mean_ms=float(own.mean()),
        share=float(own.sum() / all_stages.sum()),
        share_ci95=bootstrap_interval(sums, totals) if len(sums) > 1 else None,
        dominates_share=float((times.argmax(axis=1) == stage).mean()),
    )


def grouped(generations: Iterable[Generation], name: Callable[[Generation], Key]) -> dict[Key, list[Generation]]:
    """Items grouped by name, names in the order in which they are met."""
    groups: dict[Key, list[Generation]] = {}
    for each in generations:
        groups.setdefault(name(each), []).append(each)
    return groups


def regimes(generations: Sequence[Generation], lengths: Sequence[int | None]) -> list[Regime]:
    """Each task and vision knob at each output length, all settings pooled, in the order in which they are met."""
    groups = grouped(generations, lambda each: (each.task, each.vision))
    found = (regime_of(group, length, None) for group in groups.values() for length in lengths)
    return [each for each in found if each is not None]


def settings_fractions(generations: Sequence[Generation]) -> list[Regime]:
    """Each setting, each generation with its own length."""
    groups = grouped(generations, lambda each: (each.task, each.setting))
    found = (regime_of(group, None, setting) for (_, setting), group in groups.items())
    return [each for each in found if each is not None]


def tokens_until_decode_is_half(generations: Sequence[Generation]) -> int | None:
    """The fewest output tokens from which decode takes at least as long as vision and prefill together, in the sums.

    Only generations that reach a length count for it; None where decode stays below half.
    """
    longest = max((each.output_tokens for each in generations), default=0)
    for length in range(1, longest + 1):
        long = [each for each in generations if each.output_tokens >= length]
        vision, prefill, decode = np.array([each.stages_ms(length) for each in long]).sum(axis=0)
        if decode >= vision + prefill:
            return length
    return None


def display_lengths(generations: Sequence[Generation], least_fraction: float = 0.5) -> list[int]:
    """1, 4, 16, 64 ... and the longest length that at least that share of generations reaches."""
    lengths = sorted(each.output_tokens for each in generations)
    longest = lengths[int(len(lengths) * (1 - least_fraction))] if lengths else 0
    return [length for length in (1, 4, 16, 64, 256, 1024) if length < longest] + ([longest] if longest else [])
