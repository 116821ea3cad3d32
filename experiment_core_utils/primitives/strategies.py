"""In: the values of each knob and a strategy's name; out: the settings to measure, in order, without duplicates."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import KnobSetting, VisionTarget, select_active_blocks

T = TypeVar("T")
BALANCED_VALUES = 4


def plan_settings(
    strategy: str,
    targets: Sequence[VisionTarget],
    top_k_values: Sequence[int],
    block_counts: Sequence[int],
    total_blocks: int,
    importance: Mapping[int, float] | None,
) -> tuple[KnobSetting, ...]:
    """The settings of a run.

    `full` takes every combination. `balanced` first thins each knob to at most four values, evenly spread over the
    given ones with both ends kept, so that a grid of at most four values a knob is the full grid.

    Raises:
        ConfigurationError: another strategy, or a block count that the model does not have.
    """
    if strategy == "balanced":
        targets, top_k_values, block_counts = thin(targets), thin(sorted(top_k_values)), thin(sorted(block_counts))
    elif strategy != "full":
        raise ConfigurationError(f"sampling strategy {strategy!r} is not there; choose full or balanced")
    blocks = {count: select_active_blocks(count, total_blocks, importance) for count in block_counts}
    combinations = itertools.product(targets, top_k_values, block_counts)
    return tuple(KnobSetting(target, top_k, blocks[count]) for target, top_k, count in combinations)


def thin(values: Sequence[T], most: int = BALANCED_VALUES) -> tuple[T, ...]:
    """At most `most` of the values, evenly spread by position, first and last among them."""
    if len(values) <= most:
        return tuple(values)
    places = [round(step * (len(values) - 1) / (most - 1)) for step in range(most)]
    return tuple(values[place] for place in places)
