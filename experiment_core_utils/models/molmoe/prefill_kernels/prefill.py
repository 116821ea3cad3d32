"""In: a prompt's embeddings, padded at the right; out: the logits of its last token, and its keys and values stored.

Importing this module needs Triton.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from experiment_core_utils.models.molmoe.packed_blocks import PackedBlock, PackedDecoder
from experiment_core_utils.models.molmoe.prefill_kernels.attention import attention
from experiment_core_utils.models.molmoe.prefill_kernels.grouped_experts import expert_rows
from experiment_core_utils.models.molmoe.prefill_kernels.norms import (
    combine_norm,
    combine_norm_last,
    norm,
    turn_and_store,
)
from experiment_core_utils.models.molmoe.prefill_kernels.routing import route


def rotary_table(inverse_frequencies: torch.Tensor, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2] in float32."""
    position = torch.arange(positions, device=inverse_frequencies.device, dtype=torch.float32)
    angles = position[:, None] * inverse_frequencies
    return angles.cos(), angles.sin()


def prefill(
    decoder: PackedDecoder,
    hidden: torch.Tensor,
    length: torch.Tensor,
    blocks: Sequence[int],
    top_k: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    used: torch.Tensor,
) -> torch.Tensor:
    """One request's prompt through the blocks that run, without asking the host.

    Args:
        hidden: embeddings [T, H] with finite rows after the prompt; attention looks back only, so those change
            nothing, and no expert is spent on them.
        length: one int64, tokens of the prompt, 1 to T.
        top_k: experts per token of every block but block 0, which keeps the model's own number.
        keys, values: [L, KV, slots, D], each [KV, slots, D] contiguous, slots >= T; row i belongs to the i-th block
            that runs. Slots from `length` to T get the keys and values of the padding.
        rotary: as `rotary_table` makes it for T positions or more.
        used: the ids of an `ExpertRecord` for T * k or more, k the most experts per token of any block that runs.

    Returns:
        logits [1, V] of the last token.
    """
    return last_logits(decoder, *through(decoder, hidden, length, blocks, top_k, keys, values, rotary, used), length)


def through(
    decoder: PackedDecoder,
    hidden: torch.Tensor,
    length: torch.Tensor,
    blocks: Sequence[int],
    top_k: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    used: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `prefill`, for the states [T, H] in front of any blocks, one at least.

    Returns:
        the states but for the last block's experts, those experts' rows [T * k, H], and their shares [T, k].
    """
    eps = decoder.norm_eps
    normed = norm(hidden, decoder.blocks[blocks[0]].input_norm, length, eps)
    for position, index in enumerate(blocks):
        block = decoder.blocks[index]
        attended = _attend(decoder, block, normed, keys[position], values[position], rotary)
        hidden = torch.addmm(hidden, attended, block.output.t())
        chosen_count = decoder.default_top_k if index == 0 else top_k
        # What the experts' products read is the record itself.
        chosen = used[index, : len(hidden) * chosen_count].view(len(hidden), chosen_count)
        normed = norm(hidden, block.ffn_norm, length, eps)
        shares = route(normed, block.router, length, chosen, decoder.normalise_top_k)
        rows = expert_rows(normed, block.gate_up, block.down, chosen)
        if position + 1 < len(blocks):
            after = decoder.blocks[blocks[position + 1]].input_norm
            hidden, normed = combine_norm(hidden, rows, shares, length, after, eps)
    return hidden, rows, shares


def last_logits(
    decoder: PackedDecoder, hidden: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """What `through` gives -> logits [1, V] of row `length` - 1."""
    normed = combine_norm_last(hidden, rows, shares, length, decoder.final_norm, decoder.norm_eps)
    return linear(normed, decoder.head)


def _attend(
    decoder: PackedDecoder,
    block: PackedBlock,
    normed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """[T, H] -> [T, Q * D], before the output product."""
    rows = normed.shape[0]
    packed = linear(normed, block.qkv)
    queries = turn_and_store(
        packed, block.query_norm, block.key_norm, *rotary, keys, values, decoder.num_heads, decoder.norm_eps
    )
    attended = attention(queries.transpose(0, 1)[None], keys[None, :, :rows], values[None, :, :rows], causal=True)
    return attended.reshape(rows, -1)
