"""The option of an image processor that moves the number of image tokens, found by trial.

Candidates are the whole numbers among a processor's own options that are called a most (`max_patches`,
`max_soft_tokens`, `pan_and_scan_max_num_crops`, `dynamic_hd`), the most pixels or longest side of its `size`, and at
last the size of the picture itself, which is scaled before the processor gets it. An option is taken where the image
tokens of trial pictures never grow while it falls, and fall; of several, the first that acts on every trial picture.
Options that add tokens are tried on one picture, until they do.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.processing_utils import ImagesKwargs

from experiment_core_utils.knobs.vision_tokens import MOST_FRACTION

# (width, height) of the trial pictures: a photo, and a strip that pan and scan cuts.
TRIAL_SIZES = ((640, 480), (300, 1100))
Sizes = tuple[tuple[int, int], ...]
#: number of image tokens at a value of an option for one call with pictures of these sizes; None where it is refused
Count = Callable[["TokenOption", int, Sizes], int | None]
# Scale of a picture's sides at which it is left as it is.
WHOLE = 1000
_SWITCHES = re.compile("crop|split|scan|tile")
# Words in the names of options that are a most; "hd" are crops for high definition.
_MOST = {"max", "hd"}


@dataclass(frozen=True)
class TokenOption:
    """An option and the values that it can have."""

    name: str  #: such as `max_patches`; of `size` the key
    values: Sequence[int]  #: ascending
    is_fewer: bool  #: whether it takes tokens away; else it adds some
    own: int | None = None  #: its value without a request; None for the size of the picture
    least: tuple[str, int] | None = None  #: name and own value of the option for the fewest, which must not be above it
    is_in_size: bool = False  #: whether both are keys of `size`
    switches: tuple[str, ...] = ()  #: options that are put on with it, without which it does nothing

    @property
    def written(self) -> str:
        """As sentences name it."""
        return "the size of the picture" if self.own is None else f"size.{self.name}" if self.is_in_size else self.name

    def keywords(self, value: int) -> dict[str, Any]:
        """Keyword arguments of the image processor's call at a value."""
        if self.own is None:
            return {}
        options = {self.name: value if self.is_fewer or self.switches else max(value, self.own)}
        if self.least is not None:
            options[self.least[0]] = min(value, self.least[1]) if self.is_fewer else max(value, self.least[1])
        return {"size": options} if self.is_in_size else {**dict.fromkeys(self.switches, True), **options}

    def sizes(self, value: int, sizes: Sizes) -> Sizes:
        """The (width, height) at which pictures of these sizes are given to the processor."""
        if self.own is not None:
            return sizes
        return tuple((max(width * value // WHOLE, 1), max(height * value // WHOLE, 1)) for width, height in sizes)

    def fitting(self, target: int, sizes: Sizes, count: Count) -> int:
        """The largest value, to one in 500, at which pictures take at most so many tokens together, else the smallest
        possible one.
        """

        def is_above(tokens: int | None) -> bool:
            return tokens is not None and tokens > target

        # Values before `low` are not above, those from `high` on are; `tokens` are those of the value before `low`.
        low, high, tokens = 0, len(self.values), None
        if not self.is_fewer:
            # Pictures of the largest values would not fit into memory.
            doubled = (2**power for power in range(high.bit_length() - 1))
            high = next((index for index in doubled if is_above(count(self, self.values[index], sizes))), high)
        while low < high and tokens != target and (tokens is None or high - low > high // 500):
            middle = min(max(math.isqrt((low + 1) * (high + 1)) - 1, low), high - 1)
            tokens_there = count(self, self.values[middle], sizes)
            if is_above(tokens_there):
                high = middle
            else:
                low, tokens = middle + 1, tokens_there
        return self.values[low - 1 if tokens is not None else min(high, len(self.values) - 1)]


AS_IT_IS = TokenOption("", (WHOLE,), True)


def token_options(processor: Any, count: Count) -> tuple[TokenOption | None, TokenOption | None]:
    """The options of a processor that take image tokens away and that add some; None where there is none.

    Args:
        processor: of an image-text-to-text model, with its image processor.
    """
    counts = [count(AS_IT_IS, WHOLE, (size,)) for size in TRIAL_SIZES]
    own_tokens = [tokens for tokens in counts if tokens is not None]
    if len(own_tokens) < len(counts):
        return None, None
    by_direction: dict[bool, tuple[int, TokenOption | None]] = dict.fromkeys((True, False), (0, None))
    for candidate in _candidates(processor):
        most_moved = by_direction[candidate.is_fewer][0]
        if most_moved < (len(TRIAL_SIZES) if candidate.is_fewer else 1):
            option = _stepwise(candidate, count)
            num_moved = _num_moved(option, own_tokens, count)
            if num_moved > most_moved:
                by_direction[option.is_fewer] = num_moved, option
    return by_direction[True][1], by_direction[False][1]


def _candidates(processor: Any) -> Iterator[TokenOption]:
    images = processor.image_processor
    defaults = getattr(processor, "images_kwargs", None) or {}
    of_kind = images.valid_kwargs.__annotations__.keys() - ImagesKwargs.__annotations__.keys()
    # What the processor says of its calls stands before what its image processor says.
    values = {name: defaults.get(name, getattr(images, name, None)) for name in sorted(of_kind)}
    off = tuple(name for name, value in values.items() if value in (None, False) and _SWITCHES.search(name))
    size = {name: value for name, value in dict(getattr(images, "size", None) or {}).items() if value is not None}
    for is_in_size, options in ((False, values), (True, {"max": 0, **size})):
        for name, value in options.items():
            is_most = name == "longest_edge" if is_in_size else not _MOST.isdisjoint(name.split("_"))
            if not is_most or type(value) is not int or value < 2:
                continue
            partner = "shortest_edge" if is_in_size else name.replace("max", "min")
            least = options.get(partner)
            fewer = TokenOption(
                name, range(1, value + 1), True, value, (partner, least) if type(least) is int else None, is_in_size
            )
            yield fewer
            more = replace(fewer, is_fewer=False, values=range(1, value * MOST_FRACTION + 1))
            yield more
            if off and not is_in_size:
                yield replace(more, switches=off)
    for is_fewer, scales in ((True, range(WHOLE // 32, WHOLE + 1)), (False, range(WHOLE, 4 * WHOLE + 1))):
        yield TokenOption("", scales, is_fewer)


def _stepwise(option: TokenOption, count: Count) -> TokenOption:
    """The option with halves and doubles of its own value alone, where the processor takes no number between."""
    if option.own is None or count(option, option.own + (-1 if option.is_fewer else 1), TRIAL_SIZES[:1]) is not None:
        return option
    powers = range(option.own.bit_length())
    halves, doubles = [option.own >> power for power in reversed(powers)], [option.own << power for power in powers[:5]]
    values = halves if option.is_fewer else doubles
    return replace(option, values=tuple(value for value in values if count(option, value, TRIAL_SIZES[:1]) is not None))


def _num_moved(option: TokenOption, own_tokens: Sequence[int], count: Count) -> int:
    """On how many trial pictures the option acts, for more on the first alone; 0 where it acts the other way."""
    moved = 0
    for size, at_rest in zip(TRIAL_SIZES[: None if option.is_fewer else 1], own_tokens, strict=False):
        before = at_rest
        for value in _rungs(option):
            tokens = count(option, value, (size,))
            if tokens is not None and (tokens > before if option.is_fewer else tokens < before):
                return 0
            # Options for more go on to pictures that would not fit into memory.
            if tokens is None or (not option.is_fewer and tokens > before):
                before = tokens or before
                break
            before = tokens
        moved += before != at_rest
    return moved


def _rungs(option: TokenOption) -> list[int]:
    """A few values, each a fraction of the one before or so many times it, from the one that changes least."""
    last = len(option.values) - 1
    steps = range(0, last.bit_length(), max(last.bit_length() // 6, 1) if option.is_fewer else 3)
    indices = [index for index in dict.fromkeys([*(last >> shift for shift in steps), 0]) if index >= 0]
    values = [option.values[index] for index in (indices if option.is_fewer else reversed(indices))]
    return [value for value in values if value != (option.own or WHOLE) or not option.is_fewer]
