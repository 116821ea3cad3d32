"""Tile sizes of the decode step's kernels, by a decoder's widths, top-k and the length of the KV cache."""

from dataclasses import dataclass

from experiment_core_utils.models.molmoe.engines.gpu.triton import grouped_gemm as grouped_product
from experiment_core_utils.models.molmoe.engines.gpu.triton import tuning as tiles
from experiment_core_utils.models.molmoe.engines.gpu.triton.grouped_gemm import (
    FEWEST_ROWS,
    MOST_ROWS,
    divisor,
    tiles_of_few_rows,
)
from experiment_core_utils.models.molmoe.engines.gpu.triton.small_batch_gemm import SmallBatchTile
from experiment_core_utils.models.molmoe.engines.weights import DecoderWeights

# Sizes of tiles, and the choices between kernels, were measured on this card alone.
TUNED_ON = "H200"


# Slots whose down-projections a program reads before it multiplies them.
SLOTS_AT_ONCE = 8


def untuned_reason(card: str) -> str | None:
    """The note that the project's kernels were not tuned on a card of that name; None on the one that they were tuned
    on.
    """
    return (
        None if TUNED_ON in card else f"own kernels run with sizes that were tuned on an {TUNED_ON}, not on an {card}"
    )


@dataclass(frozen=True)
class Tile:
    """Sizes of one program: in each of so many steps, so many rows of a weight, by so many warps.

    In attention the rows are positions of the store, and the steps as many as there are.
    """

    rows: int
    warps: int
    steps: int = 1


@dataclass(frozen=True)
class StepTiles:
    """The tiles of all kernels of a decode step."""

    qkv: Tile
    attention: Tile
    splits: int  # programs that share one head's positions
    output: Tile
    gate_up: Tile  # rows of the gate, and as many of the up-projection
    down: Tile  # rows of each slot's expert
    head: Tile


# Programs that share one head's positions: many enough to fill the card, and no more than are put together at once.
FEWEST_SPLITS, MOST_SPLITS = 24, 32


def tiles_for(decoder: DecoderWeights, top_k: int, max_seq_len: int) -> StepTiles:
    """The tiles that were fastest on an H200 at MolmoE-1B's widths in bfloat16; for others, tiles of as many bytes.

    A tile is read by one load for each thread's share, so that all of it is on its way at once; registers bound it.
    Where a tile has two steps, the second is read while the first is multiplied.
    """
    width, inner, size = decoder.width, decoder.expert_width, decoder.dtype.itemsize
    attended = decoder.num_heads * decoder.head_width
    positions = _rows(16, decoder.head_width * size)
    used = min(top_k, SLOTS_AT_ONCE)
    return StepTiles(
        qkv=Tile(_rows(16, width * size), 4, 2),
        attention=Tile(positions, 2),
        splits=min(MOST_SPLITS, max(FEWEST_SPLITS, -(-max_seq_len // positions))),
        output=Tile(_rows(32, attended * size), 4),
        gate_up=Tile(_rows(8, width * size), 4, 2),
        down=Tile(min(2, _rows(32, used * inner * size)), 4),
        head=Tile(_rows(32, width * size), 8),
    )


def _rows(kibibytes: int, row_bytes: int) -> int:
    """The power of two of rows that fills so many kibibytes, at least 1."""
    return max(1, kibibytes * 1024 // _padded(row_bytes))


def _padded(size: int) -> int:
    """The smallest power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


# A head's positions are shared out over so many programs that there are about so many in all, within these bounds.
ATTENTION_PROGRAMS, FEWEST_BATCH_SPLITS, MOST_BATCH_SPLITS = 512, 2, 24


@dataclass(frozen=True)
class BatchTiles:
    """The tiles of all kernels of a step of several requests."""

    qkv: SmallBatchTile
    attention: tiles.Tile
    splits: int  # programs that share one head's positions
    output: SmallBatchTile
    experts: tuple[grouped_product.ProductTile, grouped_product.ProductTile]  # gate and up; down
    head: SmallBatchTile


def batch_tiles_for(decoder: DecoderWeights, top_k: int, max_seq_len: int, batch: int) -> BatchTiles:
    """The tiles that were fastest on an H200 at MolmoE-1B's widths in bfloat16; for others, some that fit."""
    half = decoder.dtype.itemsize == 2
    step = divisor(decoder.width, 128 if half else 32)
    single = tiles.tiles_for(decoder, top_k, max_seq_len)
    programs = batch * decoder.num_heads
    stages = 4 if half else 2
    return BatchTiles(
        qkv=SmallBatchTile(64, step, 4, stages),
        attention=single.attention,
        splits=min(MOST_BATCH_SPLITS, max(FEWEST_BATCH_SPLITS, -(-ATTENTION_PROGRAMS // programs))),
        output=SmallBatchTile(16, divisor(decoder.num_heads * decoder.head_width, 128 if half else 32), 4, stages),
        experts=tiles_of_few_rows(
            decoder.width, decoder.expert_width, decoder.head, _rows_of_expert(decoder, top_k, batch)
        ),
        head=SmallBatchTile(64, step, 4, stages),
    )


def _rows_of_expert(decoder: DecoderWeights, top_k: int, batch: int) -> int:
    """The power of two above twice the rows that an expert gets where all are chosen equally often."""
    twice = 2 * batch * top_k // decoder.num_experts
    return min(max(1 << twice.bit_length(), FEWEST_ROWS), MOST_ROWS)
