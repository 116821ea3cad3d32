"""In: a decoder's widths and the requests of a store; out: what each program of a batched step's kernels takes.

Importing this module needs Triton.
"""

from dataclasses import dataclass

from experiment_core_utils.models.molmoe.batched_kernels.shared_products import SmallBatchTile
from experiment_core_utils.models.molmoe.kernels import tiles
from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.prefill_kernels import grouped_product
from experiment_core_utils.models.molmoe.prefill_kernels.grouped_experts import (
    FEWEST_ROWS,
    MOST_ROWS,
    divisor,
    tiles_of_few_rows,
)

# A head's positions are shared out over so many programs that there are about so many in all, within these bounds.
ATTENTION_PROGRAMS, FEWEST_BATCH_SPLITS, MOST_BATCH_SPLITS = 512, 2, 24


@dataclass(frozen=True)
class BatchTiles:
    """The tiles of a whole step."""

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
    """The power of two above twice what an expert gets where all are chosen as often."""
    twice = 2 * batch * top_k // decoder.num_experts
    return min(max(1 << twice.bit_length(), FEWEST_ROWS), MOST_ROWS)
