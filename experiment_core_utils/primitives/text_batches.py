"""In: true lengths of prompts, and generated rows; out: which prompts run together, and which tokens count.

Nothing here knows a model, a device or a clock.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from experiment_core_utils.primitives.text_config import Batching


@dataclass(frozen=True)
class PlannedBatch:
    """Prompts that run together.

    Attributes:
        places: of its prompts among those given, ascending.
        over_token_limit: a single prompt that is longer than `adaptive_max_tokens`: it runs alone.
        halvings: how often a larger batch ran out of memory before it.
    """

    places: tuple[int, ...]
    over_token_limit: bool = False
    halvings: int = 0

    def halves(self) -> tuple["PlannedBatch", "PlannedBatch"]:
        """Its first and its second half, the first the smaller one of an odd number. At least 2 prompts."""
        middle = len(self.places) // 2
        parts = (self.places[:middle], self.places[middle:])
        first, second = (PlannedBatch(part, self.over_token_limit, self.halvings + 1) for part in parts)
        return first, second


def plan_batches(lengths: Sequence[int], options: Batching) -> tuple[PlannedBatch, ...]:
    """Neighbouring prompts together, in the order given; every prompt once.

    Fixed batches hold `batch_size___fixed_batching` prompts, the last one the rest. An adaptive batch takes the next
    prompt as long as (prompts x longest of them) <= `adaptive_max_tokens` and it holds no more than
    `max_batch_size___adaptive_batching`. A prompt that is longer than the limit runs alone. Prompts in order of their
    length make the least padding.

    Args:
        lengths: true tokens of each prompt.
    """
    if not options.adaptive_batching:
        size = options.batch_size___fixed_batching
        starts = range(0, len(lengths), size)
        return tuple(PlannedBatch(tuple(range(start, min(start + size, len(lengths))))) for start in starts)
    limit = options.adaptive_max_tokens
    return tuple(
        PlannedBatch(places, over_token_limit=len(places) * max(lengths[place] for place in places) > limit)
        for places in _adaptive_places(lengths, limit, options.max_batch_size___adaptive_batching)
    )


def _adaptive_places(lengths: Sequence[int], most_tokens: int, most_prompts: int) -> Iterator[tuple[int, ...]]:
    places: list[int] = []
    longest = 0
    for place, length in enumerate(lengths):
        grown = max(longest, length)
        if places and (len(places) == most_prompts or (len(places) + 1) * grown > most_tokens):
            yield tuple(places)
            places, grown = [], length
        places.append(place)
        longest = grown
    if places:
        yield tuple(places)


def up_to_end(token_ids: Sequence[int], eos_token_ids: Collection[int]) -> tuple[list[int], bool]:
    """A generated row up to its first end-of-sequence, that one included, and whether there was one."""
    for place, token in enumerate(token_ids):
        if token in eos_token_ids:
            return list(token_ids[: place + 1]), True
    return list(token_ids), False
