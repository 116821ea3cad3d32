"""In: normed hidden states and the router's choices; out: each choice's expert row, ready to be summed.

Importing this module needs Triton.
"""

import torch

from experiment_core_utils.models.molmoe.prefill_kernels.grouped_product import Tile, grouped_product
from experiment_core_utils.models.molmoe.prefill_kernels.routing import plan_chunks

# Widths that a strip or a step of a product divides.
SMALLEST_STEP = 16


def tile_for(inner: int, outer: int, dtype: torch.dtype, gated: bool) -> Tile:
    """The tile of a product with such weights.

    Both products of a block share one list of chunks, so `head` and `tail` depend on the dtype alone.
    """
    if dtype == torch.float32:
        return Tile(_divisor(outer, 64), _divisor(inner, 32), head=64, tail=32, warps=4, stages=2)
    strip = _divisor(outer, 128)
    return Tile(strip, _divisor(inner, 64), head=128, tail=32, warps=8 if strip == 128 else 4, stages=3)


def width_problem(width: int, expert_width: int) -> str | None:
    """Why such experts cannot be multiplied here; None where they can."""
    for what, size in (("hidden width", width), ("experts' width", expert_width)):
        if size % SMALLEST_STEP:
            return f"the {what} is {size}, not a multiple of {SMALLEST_STEP}"
    return None


def expert_rows(
    normed: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    tiles: tuple[Tile, Tile] | None = None,
) -> torch.Tensor:
    """[T, H] and choices [T, k] -> [T * k, H], slot by slot; slots without an expert hold anything.

    Args:
        gate_up, down: a `PackedBlock`'s, [E, 2 * I, H] and [E, H, I].
        tiles: of the two products, with the same chunk; None takes `tile_for`.
    """
    experts, width, inner = down.shape
    top_k = chosen.shape[1]
    if tiles is None:
        tiles = (tile_for(width, inner, normed.dtype, True), tile_for(inner, width, normed.dtype, False))
    order, chunks = plan_chunks(chosen, experts, tiles[0].chunk)
    activated = torch.empty((chosen.numel(), inner), dtype=normed.dtype, device=normed.device)
    grouped_product(normed, gate_up, activated, order, chunks, top_k, True, tiles[0])
    rows = torch.empty((chosen.numel(), width), dtype=normed.dtype, device=normed.device)
    grouped_product(activated, down, rows, order, chunks, top_k, False, tiles[1])
    return rows


def _divisor(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)
