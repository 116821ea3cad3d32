"""In: a kernel of a decode step and its arguments; out: its launch on the current stream.

Importing this module needs Triton.
"""

from typing import Any

import torch
import triton

from experiment_core_utils.models.molmoe.kernels.dense_products import next_token_kernel
from experiment_core_utils.models.molmoe.key_value_store import KVCache

# What one program of the choice of tokens is run by.
CHOOSING_WARPS = 8


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    warps: int,
    use_pdl: bool,
    arguments: tuple[Any, ...],
    stages: int | None = None,
    **sizes: Any,
) -> None:
    """With `use_pdl` the kernel may start, and read its weights, while the one before it ends; Hopper or newer.

    Args:
        stages: loads in flight; None is Triton's own number.
    """
    # The interpreter takes neither number.
    options: dict[str, Any] = {"launch_pdl": True} if use_pdl else {}
    if stages is not None:
        options["num_stages"] = stages
    kernel[grid](*arguments, **sizes, PDL=use_pdl, num_warps=warps, **options)


def launch_next_token(
    kv_cache: KVCache, best_logits: torch.Tensor, best_rows: torch.Tensor, rows: int, use_pdl: bool
) -> None:
    """The end of a step: of each request's best rows of the head's `rows`, both [B, blocks], the likeliest.

    It becomes the request's token, and the lengths beside the keys grow by one.
    """
    blocks = best_logits.shape[1]
    launch(
        next_token_kernel,
        (kv_cache.batch,),
        CHOOSING_WARPS,
        use_pdl,
        (best_logits, best_rows, kv_cache.next_tokens, kv_cache.device_lengths, blocks),
        rows=rows,
        PADDED=triton.next_power_of_2(blocks),
    )
