"""The importance of each block, from scores with and without it, and good sets of blocks found by removing one at a
time.

The score of a block is its mean over tasks, so that a task counts the same however many samples it has. What must not
be among the scores, such as how they were made, is in a second file beside them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from experiment_core_utils.knobs.block_choice import provenance_path, select_active_blocks
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import write_json_atomically

Blocks = tuple[int, ...]
Seen = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class TaskValues:
    """One value for each sample of a task, in an order of their own; samples of one picture share its id."""

    values: tuple[float, ...]
    image_ids: tuple[str, ...]


Measured = Mapping[str, TaskValues]


class BlockSetScorer(Protocol):
    """Measures the same samples with any set of blocks."""

    measure: str  #: what a value is; higher is better

    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """For each set, each task's values. A set may lack block 0, which then passes on what it is given."""


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks of means over samples."""

    value: float
    standard_error: float | None  #: between pictures; None for a single one
    by_task: Mapping[str, float]


def estimate(measured: Measured) -> Estimate:
    """The mean over tasks with its standard error.

    Sample i of task t, one of n_t, enters with the weight 1 / (T n_t). The variance is
    G / (G - 1) * sum over pictures of (sum of weight * (value - the task's mean))^2, as for a ratio over clusters
    (W. Cochran, "Sampling Techniques", 3rd ed. 1977, 9A): tasks that ask about the same pictures are not independent.
    """
    means = {task: sum(each.values) / len(each.values) for task, each in measured.items()}
    residuals: dict[str, float] = defaultdict(float)
    for task, each in measured.items():
        weight = 1 / (len(measured) * len(each.values))
        for value, image_id in zip(each.values, each.image_ids, strict=True):
            residuals[image_id] += weight * (value - means[task])
    groups = len(residuals)
    error = None
    if groups > 1:
        error = math.sqrt(groups / (groups - 1) * sum(each**2 for each in residuals.values()))
    return Estimate(sum(means.values()) / len(means), error, means)


def difference(one: Measured, other: Measured) -> Measured:
    """Sample by sample, `one` minus `other`; raises ValueError where they are not of the same samples."""
    if {task: each.image_ids for task, each in one.items()} != {task: each.image_ids for task, each in other.items()}:
        raise ValueError("values of different samples cannot be compared one by one")
    return {
        task: TaskValues(
            tuple(a - b for a, b in zip(each.values, other[task].values, strict=True)),
            each.image_ids,
        )
        for task, each in one.items()
    }


def leave_one_out(scorer: BlockSetScorer, total_blocks: int) -> tuple[dict[int, Estimate], Estimate]:
    """What the whole model scores more than the model without a block, for each block; and what the whole scores.

    The same samples with and without, so the standard error is that of the paired difference.
    """
    everything = tuple(range(total_blocks))
    sets = [everything, *(without(everything, block) for block in everything)]
    whole, *rest = scorer.measured(sets)
    return {block: estimate(difference(whole, found)) for block, found in enumerate(rest)}, estimate(whole)


def without(blocks: Blocks, block: int) -> Blocks:
    """The blocks but one."""
    return tuple(each for each in blocks if each != block)


@dataclass(frozen=True)
class Baseline:
    """One way to choose blocks without scores; of several sets, figures are of each sample's mean over them."""

    sets: tuple[Blocks, ...]
    score: Estimate
    set_scores: tuple[float, ...]  #: of each set, the mean over tasks
    gain: Estimate  #: of the choice over it


@dataclass(frozen=True)
class ChoiceComparison:
    """A choice of blocks against baselines with as many blocks, on the same samples."""

    blocks: Blocks
    chosen: Estimate
    baselines: Mapping[str, Baseline]


def against_baselines(
    scorer: BlockSetScorer, chosen: Mapping[int, Blocks], baselines: Mapping[str, Mapping[int, Sequence[Blocks]]]
) -> dict[int, ChoiceComparison]:
    """For each number of blocks, what the chosen ones score against the sets of each baseline.

    Fair only on samples that the choice has not seen.
    """
    sets = [*chosen.values(), *(each for of in baselines.values() for count in chosen for each in of[count])]
    distinct = list(dict.fromkeys(sets))
    found = dict(zip(distinct, scorer.measured(distinct), strict=True))
    return {
        count: ChoiceComparison(
            blocks,
            estimate(found[blocks]),
            {name: _baseline(found, blocks, tuple(of[count])) for name, of in baselines.items()},
        )
        for count, blocks in sorted(chosen.items())
    }


def _baseline(found: Mapping[Blocks, Measured], chosen: Blocks, sets: tuple[Blocks, ...]) -> Baseline:
    mean = mean_of_sets([found[block_set] for block_set in sets])
    scores = tuple(estimate(found[each]).value for each in sets)
    return Baseline(sets, estimate(mean), scores, estimate(difference(found[chosen], mean)))


def mean_of_sets(measured: Sequence[Measured]) -> Measured:
    """Each sample's mean over sets of blocks; all are of the same samples."""
    return {
        task: TaskValues(
            tuple(sum(values) / len(measured) for values in zip(*(one[task].values for one in measured), strict=True)),
            each.image_ids,
        )
        for task, each in measured[0].items()
    }


RANDOM_SETS = 5


def random_sets(count: int, total_blocks: int, seed: int) -> tuple[Blocks, ...]:
    """RANDOM_SETS different sets of `count` blocks, block 0 in each; all sets where there are fewer."""
    generator = np.random.default_rng([seed, count])
    wanted = min(RANDOM_SETS, math.comb(total_blocks - 1, count - 1))
    found: dict[Blocks, None] = {}
    while len(found) < wanted:
        others = 1 + generator.choice(total_blocks - 1, count - 1, replace=False)
        found[(0, *sorted(others.tolist()))] = None
    return tuple(found)


def chosen_by(scores: Mapping[int, Estimate], counts: Sequence[int]) -> dict[int, Blocks]:
    """The blocks that the profiler runs for each count with these scores."""
    values = {block: each.value for block, each in scores.items()}
    return {count: select_active_blocks(count, len(scores), values) for count in counts}


def save_scores(path: Path, scores: Mapping[int, Estimate], provenance: Mapping[str, Any]) -> None:
    """Write `{"0": 0.56, ...}`, and beside it the provenance with each score's standard error and tasks.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    blocks = {str(block): as_json(scores[block]) for block in sorted(scores)}
    write_json_atomically({**provenance, "blocks": blocks}, provenance_path(path))
    write_json_atomically({str(block): scores[block].value for block in sorted(scores)}, path)


def save_sets(path: Path, sets: Mapping[int, Blocks], provenance: Mapping[str, Any]) -> None:
    """Write `{"12": [0, 1, ...], ...}` as `--block_sets_file` takes it, and the provenance beside it.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    content = {str(count): list(sets[count]) for count in sorted(sets)}
    write_json_atomically({**provenance, "sets": content}, provenance_path(path))
    write_json_atomically(content, path)


def as_json(each: Estimate) -> dict[str, Any]:
    """An estimate as fields of the provenance."""
    return {"score": each.value, "standard_error": each.standard_error, "by_task": dict(each.by_task)}


def comparison_as_json(each: ChoiceComparison) -> dict[str, Any]:
    """A comparison as fields of the provenance."""
    baselines = {
        name: {
            "sets": [list(blocks) for blocks in one.sets],
            "set_scores": list(one.set_scores),
            "score": as_json(one.score),
            "gain": as_json(one.gain),
        }
        for name, one in each.baselines.items()
    }
    return {"blocks": list(each.blocks), "chosen": as_json(each.chosen), "baselines": baselines}


@contextmanager
def watched_blocks(blocks: Sequence[nn.Module], seen: Seen) -> Iterator[None]:
    """Call `seen` at every call of a block; what it returns other than None replaces the block's output."""

    def hook_of(place: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            if isinstance(output, torch.Tensor):
                return seen(place, given, output)
            replaced = seen(place, given, output[0])
            return None if replaced is None else (replaced, *output[1:])

        return hook

    handles = [block.register_forward_hook(hook_of(place), with_kwargs=True) for place, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def passed_through(block: nn.Module) -> AbstractContextManager[None]:
    """While it lasts, the block gives back the hidden states that it is given, as if it were left out.

    It still computes and fills its part of the cache, which nothing then looks at. For block 0, which no setting of
    the knob leaves out.
    """
    return watched_blocks([block], lambda _, given, output: given)


def select_block_sets(
    score: Callable[[Sequence[Blocks]], Sequence[float]],
    total_blocks: int,
    counts: Sequence[int],
    beam_width: int = 1,
) -> dict[int, Blocks]:
    """The best set found for each of `counts`, block 0 in all of them.

    From all blocks on, each of the `beam_width` best sets so far loses each of its blocks in turn, all are scored anew,
    and the best ones are kept: a beam search, of width 1 a greedy one. At equal scores the set that keeps the earlier
    blocks is better. A set of a greedy search is part of the larger ones; with a wider beam it need not be.

    Args:
        score: higher is better; is given all sets of a step at once, at most `beam_width` times the number of blocks.

    Raises:
        ConfigurationError: a count outside 1..total_blocks, or a beam without width.
    """
    outside = [count for count in counts if not 1 <= count <= total_blocks]
    if outside or not counts:
        raise ConfigurationError(f"{outside or 'no'} active blocks are not possible; give 1 to {total_blocks}")
    if beam_width < 1:
        raise ConfigurationError(f"a beam of width {beam_width} is empty; give at least 1")
    beam: list[Blocks] = [tuple(range(total_blocks))]
    best = {total_blocks: beam[0]}
    for count in range(total_blocks - 1, min(counts) - 1, -1):
        candidates = sorted({tuple(b for b in blocks if b != gone) for blocks in beam for gone in blocks if gone != 0})
        ranked = sorted(zip(score(candidates), candidates, strict=True), key=lambda pair: (-pair[0], pair[1]))
        beam = [blocks for _, blocks in ranked[:beam_width]]
        best[count] = beam[0]
    return {count: best[count] for count in counts}
