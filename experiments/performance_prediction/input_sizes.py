"""In: a range of input sizes and how many; out: that many sizes, evenly spread. Pure."""

from experiment_core_utils.primitives.errors import ConfigurationError

# The most of a side of an input, and of images in a batch.
MOST_PIXELS, MOST_IMAGES = 100_000, 1_000_000


def evenly_spread(smallest: int, largest: int, count: int) -> tuple[int, ...]:
    """`count` whole numbers from `smallest` to `largest`, both among them; a single one is the smallest.

    Raises:
        ConfigurationError: no size, or fewer whole numbers in the range than sizes.
    """
    if count < 1 or largest - smallest + 1 < count:
        raise ConfigurationError(
            f"{count} different input sizes do not fit between {smallest} and {largest}; take fewer or a wider range"
        )
    if count == 1:
        return (smallest,)
    return tuple(smallest + round(place * (largest - smallest) / (count - 1)) for place in range(count))


def checked_sizes(sizes: tuple[int, ...], model: str, least: int) -> tuple[int, ...]:
    """Input sizes in ascending order, each once; raises ConfigurationError for one below what the network takes."""
    too_small = [size for size in sizes if size < least]
    if too_small:
        raise ConfigurationError(f"{model} takes inputs of {least} pixels and more, not {too_small[0]}")
    return tuple(sorted(set(sizes)))
