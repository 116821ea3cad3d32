"""In: normed hidden states and the router's choices; out: each choice's expert row, ready to be summed.

Importing this module needs Triton.
"""

import torch

from experiment_core_utils.models.molmoe.prefill_kernels.grouped_product import ProductTile, grouped_gemm
from experiment_core_utils.models.molmoe.prefill_kernels.routing import align_blocks

# Shared memory of a program, in bytes, that the widest tile takes.
MEMORY_OF_WIDE_TILES = 160 * 1024
# Rows of one expert where they are few: what tensor cores take at least, and what shared memory bounds.
FEWEST_ROWS, MOST_ROWS = 16, 32


def tiles_for(width: int, expert_width: int, like: torch.Tensor) -> tuple[ProductTile, ProductTile]:
    """Tiles of the two products (gate and up; down), for weights in the dtype and on the device of `like`.

    Both share one list of chunks, so both take the same number of rows.
    """
    strips, steps = (
        (divisor(expert_width, 128), divisor(width, 128)),
        (divisor(width, 64), divisor(expert_width, 64)),
    )
    room, hopper = device_limits(like.device)
    if like.dtype == torch.float32:
        stages = 2 if room < MEMORY_OF_WIDE_TILES else 3
        first, second = (
            ProductTile(min(strip, 64), min(step, 32), head=64, tail=32, warps=4, stages=stages)
            for strip, step in zip(strips, steps, strict=True)
        )
        return first, second
    if room < MEMORY_OF_WIDE_TILES or min(strips) < 128:
        first, second = (
            ProductTile(min(strip, 64), step, head=64, tail=32, warps=4, stages=3)
            for strip, step in zip(strips, steps, strict=True)
        )
        return first, second
    first = ProductTile(128, steps[0], head=128, tail=32, warps=8, stages=3)
    if not hopper:
        return first, ProductTile(128, steps[1], head=128, tail=32, warps=8, stages=3)
    return first, ProductTile(divisor(width, 256), steps[1], head=128, tail=32, warps=8, stages=4, bulk=True)


def tiles_of_few_rows(width: int, expert_width: int, like: torch.Tensor, rows: int) -> tuple[ProductTile, ProductTile]:
    """As `tiles_for`, where reading weights is what takes the time: chunks of `rows`, FEWEST_ROWS to MOST_ROWS."""
    room, hopper = device_limits(like.device)
    wide = room >= MEMORY_OF_WIDE_TILES and like.dtype != torch.float32
    most, steps = (128, 128 if hopper else 64) if wide else (64, 32)

    def tile(outer: int, inner: int, warps: int) -> ProductTile:
        strip, step = divisor(outer, most), divisor(inner, steps)
        bulk = hopper and wide and strip == most
        return ProductTile(strip, step, head=rows, tail=0, warps=warps, stages=3 if wide else 2, bulk=bulk)

    return tile(expert_width, width, 8 if wide else 4), tile(width, expert_width, 4)


def expert_rows(
    normed: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_ids: torch.Tensor,
    tiles: tuple[ProductTile, ProductTile] | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """[T, H] and choices [T, k] -> [T * k, H], slot by slot; slots without an expert hold anything.

    Args:
        gate_up, down: a `BlockWeights`'s, [E, 2 * I, H] and [E, H, I].
        tiles: of the two products, with the same chunk; None takes `tiles_for`.
        use_pdl: see `launch`.
    """
    experts, width, inner = down.shape
    top_k = topk_ids.shape[1]
    if tiles is None:
        tiles = tiles_for(width, inner, normed)
    order, row_blocks = align_blocks(topk_ids, experts, tiles[0].chunk, use_pdl)
    activated = torch.empty((topk_ids.numel(), inner), dtype=normed.dtype, device=normed.device)
    grouped_gemm(normed, gate_up, activated, order, row_blocks, top_k, True, tiles[0], use_pdl)
    rows = torch.empty((topk_ids.numel(), width), dtype=normed.dtype, device=normed.device)
    grouped_gemm(activated, down, rows, order, row_blocks, top_k, False, tiles[1], use_pdl)
    return rows


def divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


def device_limits(device: torch.device) -> tuple[int, bool]:
    """Shared memory that a program may have, in bytes, and whether there is a bulk copy engine."""
    if device.type != "cuda":
        return 0, False
    properties = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return room, properties.major >= 9
