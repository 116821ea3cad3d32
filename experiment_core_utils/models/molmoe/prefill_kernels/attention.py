"""In: queries, keys and values; out: attention by cuDNN's kernel where it takes them, else by torch's choice."""

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# The first generation of GPUs on which cuDNN's kernel is the faster one: on an H200 it takes 25 us where the flash
# kernel takes 60 for a prompt of 1053 tokens, and 64 where that takes 86 for 13 crops.
FIRST_WITH_FASTER_CUDNN = 9


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
    """[B, Q, T, D] over [B, KV, T, D] -> [B, T, Q, D]; a key head serves Q / KV query heads."""
    grouped = queries.shape[1] != keys.shape[1]
    if _cudnn_is_faster(queries, keys, values, causal, grouped):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
    else:
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
    return attended.transpose(1, 2)


def attention_of_last(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """[1, Q, D], the queries of position `length` - 1 (one int64), over [KV, T, D] -> [1, Q, D]."""
    seen = torch.arange(keys.shape[1], device=keys.device) < length
    grouped = queries.shape[1] != keys.shape[0]
    attended = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen[None, None, None], enable_gqa=grouped
    )
    return attended[0].transpose(0, 1)


def _cudnn_is_faster(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, grouped: bool
) -> bool:
    if not queries.is_cuda or torch.cuda.get_device_capability(queries.device)[0] < FIRST_WITH_FASTER_CUDNN:
        return False
    return can_use_cudnn_attention(SDPAParams(queries, keys, values, None, 0.0, causal, grouped))
