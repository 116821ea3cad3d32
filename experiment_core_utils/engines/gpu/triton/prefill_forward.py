"""The prefill of one prompt, padded on the right: logits of its last token, and its keys and values in the KV cache.

Importing this module needs Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from experiment_core_utils.engines.gpu.triton.grouped_gemm import expert_rows
from experiment_core_utils.engines.gpu.triton.norms import (
    apply_rope_and_store,
    combine_norm,
    gated,
    norm,
)
from experiment_core_utils.engines.gpu.triton.routing import route
from experiment_core_utils.engines.gpu.triton.tuning import (
    FEWEST_ROWS,
    Card,
    ProductTile,
    tiles_of_few_rows,
)
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, window: int | None = None
) -> torch.Tensor:
    """Attention of [B, Q, T, D] over [B, KV, T, D] -> [B, T, Q, D]; a key head serves Q / KV query heads.

    Args:
        window: positions that one sees, itself the last of them; None for all that `causal` leaves.
    """
    grouped = queries.shape[1] != keys.shape[1]
    if window is not None and window < keys.shape[2]:
        at = torch.arange(keys.shape[2], device=keys.device)
        before = at[:, None] - at
        seen = (before >= 0) & (before < window)
        # With a mask no fused kernel of torch serves heads that share keys.
        keys, values = (each.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for each in (keys, values))
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    elif _cudnn_is_faster(queries, keys, values, causal, grouped):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
    else:
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
    return attended.transpose(1, 2)


def attention_of_last(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Attention [1, Q, D] of the queries [1, Q, D] of position `length` - 1 (one int64) over [KV, T, D]; `window` as
    of `attention`.
    """
    at = torch.arange(keys.shape[1], device=keys.device)
    seen = at < length
    if window is not None:
        seen &= at >= length - window
    grouped = queries.shape[1] != keys.shape[0]
    attended = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen[None, None, None], enable_gqa=grouped
    )
    return attended[0].transpose(0, 1)


def _cudnn_is_faster(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, grouped: bool
) -> bool:
    # On an H200 it takes 25 us where the flash kernel takes 60 for a prompt of 1053 tokens, and 64 where that takes 86
    # for 13 crops.
    if not Card.of(queries.device).is_hopper:
        return False
    return can_use_cudnn_attention(SDPAParams(queries, keys, values, None, 0.0, causal, grouped))


def rotary_table(decoder: DecoderWeights, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2] in float32."""
    position = torch.arange(positions, device=decoder.device, dtype=torch.float32)
    angles = position[:, None] * decoder.inverse_frequencies
    return decoder.rotary_scale * angles.cos(), decoder.rotary_scale * angles.sin()


@dataclass(frozen=True)
class PromptPlaces:
    """What the prefill of one request reads beside its states, and where it writes."""

    length: torch.Tensor  #: one int64, tokens of the prompt (and of the row after it, before a pause), 1 to T
    #: keys, values: [L, KV, slots, D], each [KV, slots, D] contiguous, slots >= T; row i belongs to the i-th block that
    #: runs. Positions from `length` to T get the keys and values of the padding.
    keys: torch.Tensor
    values: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]  #: as `rotary_table` makes it for T positions or more
    #: the ids of an `ExpertRecord` for T * k or more, k the most experts per token of any block that runs; of the last
    #: block of a prefill, the ids of the last token alone
    used: torch.Tensor
    added: Sequence[torch.Tensor] = ()  #: states [T, H] to add after each of the first blocks that run


def prefill(
    decoder: DecoderWeights, hidden: torch.Tensor, blocks: Sequence[int], top_k: int, places: PromptPlaces
) -> torch.Tensor:
    """Run one request's prompt through the active blocks, without waiting for the host.

    Args:
        hidden: embeddings [T, H] with finite rows after the prompt; attention looks back only, so those change
            nothing, and no expert is spent on them.
        top_k: experts per token of every block but block 0, which keeps the model's own number.

    Returns:
        logits [1, V] of the last token.
    """
    return linear(last_state(decoder, hidden, blocks, top_k, places), decoder.head)


def last_state(
    decoder: DecoderWeights, hidden: torch.Tensor, blocks: Sequence[int], top_k: int, places: PromptPlaces
) -> torch.Tensor:
    """The state [1, H] that `prefill` multiplies with the head."""
    hidden, normed = through(decoder, hidden, blocks[:-1], top_k, places, decoder.blocks[blocks[-1]].input_norm)
    return _last_state(decoder, hidden, normed, len(blocks) - 1, blocks[-1], top_k, places)


def through(
    decoder: DecoderWeights,
    hidden: torch.Tensor,
    blocks: Sequence[int],
    top_k: int,
    places: PromptPlaces,
    after: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, H] after any blocks, which may be none, as `prefill` runs them.

    Args:
        after: the norm [H] of what follows; None where it has none.

    Returns:
        the states after the blocks and their norm, both [T, H].
    """
    length = places.length
    norms = [*(decoder.blocks[index].input_norm for index in blocks), after]
    normed = _normed(decoder, hidden, norms[0], length)
    for row, index in enumerate(blocks):
        block = decoder.blocks[index]
        attended = _attend(decoder, block, normed, row, places)
        hidden = _with_attended(decoder, block, hidden, attended, places)
        hidden, normed = _mixed(decoder, index, hidden, top_k, places, norms[row + 1], None)
        if row < len(places.added):
            hidden = hidden + places.added[row]
            normed = _normed(decoder, hidden, norms[row + 1], length)
    return hidden, normed


def _normed(
    decoder: DecoderWeights, hidden: torch.Tensor, weight: torch.Tensor | None, length: torch.Tensor
) -> torch.Tensor:
    """RMS norm of states [T, H]; the states themselves without a weight."""
    return hidden if weight is None else norm(hidden, weight, length, decoder.norm_eps)


def _with_attended(
    decoder: DecoderWeights, block: BlockWeights, hidden: torch.Tensor, attended: torch.Tensor, places: PromptPlaces
) -> torch.Tensor:
    """States [T, H] after a block's attention [T, Q * D]."""
    if block.post_attention_norm is None:
        return torch.addmm(hidden, attended, block.output.t())
    return hidden + _normed(decoder, linear(attended, block.output), block.post_attention_norm, places.length)


def _last_state(
    decoder: DecoderWeights,
    hidden: torch.Tensor,
    normed: torch.Tensor,
    row: int,
    index: int,
    top_k: int,
    places: PromptPlaces,
) -> torch.Tensor:
    """The state [1, H] for the head, from states [T, H] before the last block and their norm.

    After its keys and values only row `length` - 1 is read, and so nothing else is computed.
    """
    block, length, seen = decoder.blocks[index], places.length, normed.shape[0]
    last = length - 1
    queries = _queries(decoder, block, normed, row, places).index_select(0, last)
    keys, values = places.keys[row, :, :seen], places.values[row, :, :seen]
    attended = attention_of_last(queries, keys, values, length, block.window).reshape(1, -1)
    state = _with_attended(decoder, block, hidden.index_select(0, last), attended, places)
    tiles = tiles_of_few_rows(decoder.width, decoder.expert_width, state, FEWEST_ROWS)
    state, normed = _mixed(decoder, index, state, top_k, places, decoder.final_norm, tiles)
    if row < len(places.added):
        state = state + places.added[row].index_select(0, last)
        normed = norm(state, decoder.final_norm, length, decoder.norm_eps)
    return normed


def _mixed(
    decoder: DecoderWeights,
    index: int,
    hidden: torch.Tensor,
    top_k: int,
    places: PromptPlaces,
    after: torch.Tensor | None,
    tiles: tuple[ProductTile, ProductTile] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, H] after a block's experts or its dense layers, from those after its attention, and their norm."""
    block, length, eps = decoder.blocks[index], places.length, decoder.norm_eps
    given = _normed(decoder, hidden, block.ffn_norm, length)
    if block.router is None:
        added = linear(gated(linear(given, block.gate_up[0])), block.down[0])
        if block.post_ffn_norm is None and after is not None:
            return combine_norm(hidden, added, None, length, after, eps)
        hidden = hidden + _normed(decoder, added, block.post_ffn_norm, length)
        return hidden, _normed(decoder, hidden, after, length)
    rows, topk_weights = _experts(decoder, index, given, top_k, places, tiles)
    if block.shared_gate_up is not None and block.shared_down is not None:
        products = gated(linear(given, block.shared_gate_up))
        if block.shared_gate is not None:
            products = products * linear(given, block.shared_gate).sigmoid()
        hidden = torch.addmm(hidden, products, block.shared_down.t())
    # With experts all norms are before the parts.
    assert after is not None
    return combine_norm(hidden, rows, topk_weights, length, after, eps)


def _experts(
    decoder: DecoderWeights,
    index: int,
    normed: torch.Tensor,
    top_k: int,
    places: PromptPlaces,
    tiles: tuple[ProductTile, ProductTile] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts' rows [T * k, H] of normed states [T, H] and their weights [T, k], in `expert_rows`' tiles."""
    block = decoder.blocks[index]
    count = decoder.experts_of(index, top_k)
    # What the experts' products read is the record itself.
    topk_ids = places.used[index, : len(normed) * count].view(len(normed), count)
    topk_weights = route(normed, block.router, places.length, topk_ids, decoder.normalise_top_k)
    return expert_rows(normed, block.gate_up, block.down, topk_ids, tiles), topk_weights


def _attend(
    decoder: DecoderWeights, block: BlockWeights, normed: torch.Tensor, row: int, places: PromptPlaces
) -> torch.Tensor:
    """Attention of normed states [T, H] -> [T, Q * D], before the output product."""
    rows = normed.shape[0]
    queries = _queries(decoder, block, normed, row, places)
    keys, values = places.keys[row, None, :, :rows], places.values[row, None, :, :rows]
    return attention(queries.transpose(0, 1)[None], keys, values, causal=True, window=block.window).reshape(rows, -1)


def _queries(
    decoder: DecoderWeights, block: BlockWeights, normed: torch.Tensor, row: int, places: PromptPlaces
) -> torch.Tensor:
    """Queries [T, Q, D] of normed states [T, H]; keys and values go to the first T positions."""
    qkv_states, stored = linear(normed, block.qkv, block.qkv_bias), (places.keys[row], places.values[row])
    return apply_rope_and_store(
        qkv_states,
        block.query_norm,
        block.key_norm,
        *places.rotary,
        *stored,
        decoder.num_heads,
        decoder.norm_eps,
        decoder.norms_of_heads(block),
        block.has_rope,
    )


def begin(decoder: DecoderWeights, hidden: torch.Tensor, pause: int, places: PromptPlaces) -> torch.Tensor:
    """States [T, H] after the first `pause` blocks, each with the model's own number of experts."""
    # Whatever norm comes next, it is not known yet: the states alone are of use.
    states, _ = through(decoder, hidden, range(pause), decoder.default_top_k, places, decoder.final_norm)
    return states


def finish(
    decoder: DecoderWeights, hidden: torch.Tensor, blocks: Sequence[int], top_k: int, places: PromptPlaces
) -> torch.Tensor:
    """Logits [1, V] of the prompt's last token, from the states [T, H] of `begin` through the blocks that have not run.

    Args:
        blocks: none, where all have run.
        places: their length is that of the prompt alone: no expert runs on the row after it any more. Rows of keys and
            values are those of `blocks`.
    """
    if not blocks:
        return linear(norm(hidden, decoder.final_norm, places.length, decoder.norm_eps, last=True), decoder.head)
    return prefill(decoder, hidden, blocks, top_k, places)
