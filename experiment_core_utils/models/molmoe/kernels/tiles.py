"""In: a decoder's widths and a top-k; out: how much of a weight each program of a decode step's kernels takes."""

from dataclasses import dataclass

from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder


@dataclass(frozen=True)
class Tile:
    """What one program takes: so many rows of a weight (positions of the store, in attention), by so many warps."""

    rows: int
    warps: int


@dataclass(frozen=True)
class StepTiles:
    """The tiles of a whole step."""

    qkv: Tile
    attention: Tile
    splits: int  # programs that share one head's positions
    output: Tile
    router: Tile
    gate_up: Tile  # rows of the gate, and as many of the up-projection
    down: Tile
    head: Tile


def tiles_for(decoder: PackedDecoder, top_k: int) -> StepTiles:
    """The tiles that were fastest at MolmoE-1B's widths in bfloat16; half the rows where a weight takes twice the bytes.

    A tile is read by one load, so that all of it is on its way at once; its size is bounded by registers.
    """
    share = 1 if decoder.dtype.itemsize == 2 else 2
    return StepTiles(
        qkv=Tile(8 // share, 8),
        attention=Tile(128 // share, 8),
        splits=8,
        output=Tile(16 // share, 8),
        router=Tile(1, 4),
        gate_up=Tile(4 // share, 4),
        down=Tile(4 // share, 8),
        head=Tile(16 // share, 8),
    )
