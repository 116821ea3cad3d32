"""In: a decoder's widths and a top-k; out: how much of a weight each program of a decode step's kernels takes."""

from dataclasses import dataclass

from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder


@dataclass(frozen=True)
class Tile:
    """What one program takes, by so many warps: in each of so many steps, so many rows of a weight.

    In attention the rows are positions of the store, and the steps as many as there are.
    """

    rows: int
    warps: int
    steps: int = 1


@dataclass(frozen=True)
class StepTiles:
    """The tiles of a whole step."""

    qkv: Tile
    attention: Tile
    splits: int  # programs that share one head's positions
    ahead: int  # mebibytes of the next weight that attention's programs fetch into the second-level cache; 0 for none
    output: Tile
    router: Tile
    gate_up: Tile  # rows of the gate, and as many of the up-projection
    down: Tile  # rows of each slot's expert
    head: Tile


def tiles_for(decoder: PackedDecoder, top_k: int) -> StepTiles:
    """The tiles that were fastest at MolmoE-1B's widths in bfloat16; for others, tiles of as many bytes.

    A tile is read by one load for each thread's share, so that all of it is on its way at once; registers bound it.
    """
    width, inner, size = decoder.width, decoder.expert_width, decoder.dtype.itemsize
    attended = decoder.num_heads * decoder.head_width
    slots = _padded(top_k)
    return StepTiles(
        qkv=Tile(_rows(8, width * size), 4),
        attention=Tile(_rows(32, decoder.head_width * size), 8),
        splits=8,
        ahead=0,
        output=Tile(_rows(64, attended * size), 16),
        router=Tile(1, 8),
        gate_up=Tile(_rows(16, width * size), 4),
        down=Tile(_rows(32, slots * inner * size), 4),
        head=Tile(_rows(32, width * size), 8),
    )


def _rows(kibibytes: int, row_bytes: int) -> int:
    """The power of two of rows that fill so much, at least 1."""
    return max(1, kibibytes * 1024 // _padded(row_bytes))


def _padded(size: int) -> int:
    """The power of two that covers it."""
    return 1 << (size - 1).bit_length()
