"""In: measured generations; out: lines of vision, prefill and decode time against what each stage works on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from experiments.core_exp.latency_fits import LineFit, fit_line
from experiments.core_exp.stage_decomposition import Generation, grouped

# What is on the x axis of each stage.
DRIVERS = {"vision": "image_features", "prefill": "prompt_tokens", "decode": "output_tokens"}


@dataclass(frozen=True)
class StageLine:
    """A stage's time in ms against its driver, over the generations that have top-k and blocks in common, or over all.

    Attributes:
        top_k, num_active_blocks: None where all values are pooled, as for vision, which they do not touch.
        reason: why there is no line.
    """

    task: str
    stage: str
    driver: str
    top_k: int | None
    num_active_blocks: int | None
    fit: LineFit | None
    reason: str | None


@dataclass(frozen=True)
class Point:
    """A stage's time at one value of its driver, and the generation that it is of."""

    x: float
    ms: float
    generation: Generation


def points_of(generations: Sequence[Generation], stage: str) -> list[Point]:
    """One a generation; for decode one for each token after the first: the time of the first n of the generation."""
    if stage == "decode":
        return [
            Point(float(token), ms, each)
            for each in generations
            for token, ms in enumerate(accumulate(each.inter_token_ms), start=2)
        ]
    if stage == "prefill":
        return [Point(float(each.prompt_tokens), each.prefill_ms, each) for each in generations]
    return [
        Point(float(each.image_features), each.vision_ms, each)
        for each in generations
        if each.image_features is not None and each.vision_ms is not None
    ]


def stage_lines(generations: Sequence[Generation]) -> list[StageLine]:
    """For each task: each stage over all settings; prefill and decode for each number of blocks, and top-k with it."""
    lines = []
    for task in dict.fromkeys(each.task for each in generations):
        own = [each for each in generations if each.task == task]
        by_blocks = grouped(own, lambda each: each.num_active_blocks)
        by_both = grouped(
            (each for each in own if each.top_k is not None), lambda each: (each.num_active_blocks, each.top_k or 0)
        )
        for stage in DRIVERS:
            lines.append(_line(own, task, stage, None, None))
            if stage == "vision":
                continue
            lines += [_line(by_blocks[count], task, stage, None, count) for count in sorted(by_blocks)]
            lines += [_line(by_both[both], task, stage, both[1], both[0]) for both in sorted(by_both)]
    return lines


def _line(generations: Sequence[Generation], task: str, stage: str, top_k: int | None, blocks: int | None) -> StageLine:
    points = points_of(generations, stage)
    ways = [each.generation.picture for each in points], [each.generation.setting for each in points]
    fit, reason = fit_line([each.x for each in points], [each.ms for each in points], ways)
    return StageLine(task, stage, DRIVERS[stage], top_k, blocks, fit, reason)
