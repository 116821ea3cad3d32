"""In: what sets of blocks score; out: for each number of blocks a good set, by taking blocks away one after another."""

from collections.abc import Callable, Sequence

from experiment_core_utils.primitives.errors import ConfigurationError

Blocks = tuple[int, ...]


def select_block_sets(
    score: Callable[[Sequence[Blocks]], Sequence[float]],
    total_blocks: int,
    counts: Sequence[int],
    beam_width: int = 1,
) -> dict[int, Blocks]:
    """The best set found for each of `counts`, block 0 in all of them.

    From all blocks on, each of the `beam_width` best sets so far loses each of its blocks in turn, all are scored anew,
    and the best ones go on: a beam search, of width 1 a greedy one. At equal scores the set that keeps the earlier
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
        raise ConfigurationError(f"a beam of width {beam_width} holds nothing; give at least 1")
    beam: list[Blocks] = [tuple(range(total_blocks))]
    best = {total_blocks: beam[0]}
    for count in range(total_blocks - 1, min(counts) - 1, -1):
        candidates = sorted({tuple(b for b in blocks if b != gone) for blocks in beam for gone in blocks if gone != 0})
        ranked = sorted(zip(score(candidates), candidates, strict=True), key=lambda pair: (-pair[0], pair[1]))
        beam = [blocks for _, blocks in ranked[:beam_width]]
        best[count] = beam[0]
    return {count: best[count] for count in counts}
