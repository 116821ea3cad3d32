"""One decode step of several requests, which reads each weight once for all of them.

Dense weights are read once for up to 64 requests, each expert's once for all requests that chose it: its rows are
gathered as in a prefill. A block takes eight kernels. The residual stream is float32; the factors of products are in
the weights' dtype, as in the modules. Importing this module needs Triton.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.triton.flash_decoding import AttentionBuffers, launch_attention
from experiment_core_utils.engines.gpu.triton.gemv import (
    is_last,
    launch,
    launch_next_token,
    normed,
    ranked,
    small_batch_gemm,
    stream_row,
    wait_for_previous,
)
from experiment_core_utils.engines.gpu.triton.grouped_gemm import expert_rows
from experiment_core_utils.engines.gpu.triton.tuning import BatchTiles, step_of_router, tuning_at
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights


@dataclass(frozen=True)
class BatchBuffers:
    """Buffers between the kernels of a step of B requests; float32 unless noted."""

    stream: torch.Tensor  # [B, H] the residual stream
    unit: torch.Tensor  # [B, H] its norm, in the weights' dtype
    attention: AttentionBuffers  # with the weights' dtype for what the heads attended to
    counters: torch.Tensor  # [B] int32, 0 between kernels
    used: ExpertRecord  # of B tokens; the experts' products read it
    logits: torch.Tensor  # [B, V]
    best_logits: torch.Tensor  # [B, blocks of the head]
    best_rows: torch.Tensor  # [B, blocks of the head] int32

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, decoder: DecoderWeights, batch: int, max_seq_len: int, tiles: BatchTiles) -> "BatchBuffers":
        """The buffers, beside the decoder's weights, for every setting of a KV cache of this size."""
        rows, width = decoder.head.shape
        blocks = triton.cdiv(rows, tiles.head.rows)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=decoder.device)

        return cls(
            stream=floats(batch, width),
            unit=floats(batch, width).to(decoder.dtype),
            attention=AttentionBuffers.allocate(decoder, batch, max_seq_len, tiles.splits, decoder.dtype),
            counters=torch.zeros(batch, dtype=torch.int32, device=decoder.device),
            used=ExpertRecord.allocate(decoder, batch * decoder.num_experts),
            logits=floats(batch, rows),
            best_logits=floats(batch, blocks),
            best_rows=torch.empty((batch, blocks), dtype=torch.int32, device=decoder.device),
        )


@dataclass(frozen=True)
class BatchedStep:
    """One decode step of all requests of a KV cache together."""

    decoder: DecoderWeights
    kv_cache: KVCache
    buffers: BatchBuffers  #: for this cache's batch and max_seq_len, made with these tiles
    tiles: BatchTiles
    use_pdl: bool  #: whether a kernel may start while the one before it ends; needs Hopper or newer

    def launch(self, knobs: EngineKnobs) -> torch.Tensor:
        decoder, buffers = self.decoder, self.buffers
        norms = [decoder.blocks[index].input_norm for index in knobs.blocks] + [decoder.final_norm]
        summed_norm(decoder.embedding, self.kv_cache.next_tokens, None, norms[0], *self._normed)
        for row, index in enumerate(knobs.blocks):
            block = decoder.blocks[index]
            self._attend(block, row)
            top_k = knobs.top_k if index else decoder.default_top_k
            experts = self._experts(block, buffers.used.ids[index], top_k)
            summed_norm(buffers.stream, None, experts, norms[row + 1], *self._normed)
        best = buffers.best_logits, buffers.best_rows
        small_batch_gemm(buffers.unit, decoder.head, buffers.logits, self.tiles.head, self.use_pdl, best)
        launch_next_token(self.kv_cache, *best, buffers.logits.shape[1], self.use_pdl)
        return buffers.logits

    @property
    def _normed(self) -> tuple[torch.Tensor, torch.Tensor, float, bool]:
        return self.buffers.stream, self.buffers.unit, self.decoder.norm_eps, self.use_pdl

    def _attend(self, block: BlockWeights, row: int) -> None:
        """Attention and output projection of a block: `unit` -> `stream`."""
        buffers, tiles, use_pdl = self.buffers, self.tiles, self.use_pdl
        attention = buffers.attention
        small_batch_gemm(buffers.unit, block.qkv, attention.qkv, tiles.qkv, use_pdl)
        launch_attention(self.decoder, block, self.kv_cache, row, attention, tiles.attention, tiles.splits, use_pdl)
        small_batch_gemm(attention.attended, block.output, buffers.stream, tiles.output, use_pdl, added=True)

    def _experts(self, block: BlockWeights, used: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B * k, H] of each request's experts, and their weights [B, k]."""
        buffers, decoder, use_pdl = self.buffers, self.decoder, self.use_pdl
        # What the experts' products read is the record itself.
        topk_ids = used[: self.kv_cache.batch * top_k].view(-1, top_k)
        topk_weights = routed_norm(
            buffers.stream,
            block.ffn_norm,
            block.router,
            buffers.unit,
            topk_ids,
            buffers.counters,
            decoder.norm_eps,
            decoder.normalise_top_k,
            use_pdl,
        )
        rows = expert_rows(buffers.unit, block.gate_up, block.down, topk_ids, self.tiles.experts, use_pdl)
        return rows, topk_weights


@triton.jit
def summed_norm_kernel(  # type: ignore[no-untyped-def]
    source,
    tokens,
    expert_rows,
    topk_weights,
    norm,
    stream,
    unit,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    EMBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute stream = source + the weighted sum of its experts' rows, in their order, and unit = its norm. Programs:
    requests.
    """
    request = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    scale = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_previous(PDL)
    begin = stream_row(source, tokens, request, WIDTH, EMBED)
    state = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = request * TOP_K + choice
        part = tl.load(expert_rows + slot * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        state += tl.load(topk_weights + slot) * part
    tl.store(stream + request * WIDTH + column, state, mask=inside)
    state = normed(state, scale, WIDTH, eps)
    tl.store(unit + request * WIDTH + column, state.to(unit.dtype.element_ty), mask=inside)


@triton.jit
def routed_norm_kernel(  # type: ignore[no-untyped-def]
    stream,
    norm,
    router,
    unit,
    parts,
    counters,
    topk_ids,
    topk_weights,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute unit = the norm of `stream`, and topk_ids [B, TOP_K], the experts with the largest logits, with their
    weights.

    Programs: (request, block of columns). Each gives its columns' `parts` [B, blocks, E] of the logits, and the last of
    a request to finish ranks its experts.
    """
    request = tl.program_id(0)
    own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, PADDED_E)
    there = (expert < E)[:, None] & (own < WIDTH)[None, :]
    gate = tl.load(router + expert[:, None] * WIDTH + own[None, :], mask=there, other=0.0)
    scale = tl.load(norm + own, mask=own < WIDTH, other=0.0).to(tl.float32)
    column = tl.arange(0, PADDED)
    stream += request * WIDTH
    wait_for_previous(PDL)
    state = tl.load(stream + column, mask=column < WIDTH, other=0.0)
    value = tl.load(stream + own, mask=own < WIDTH, other=0.0)
    value = value * tl.rsqrt(tl.sum(state * state, axis=0) / WIDTH + eps) * scale
    tl.store(unit + request * WIDTH + own, value.to(unit.dtype.element_ty), mask=own < WIDTH)
    blocks: tl.constexpr = PADDED // COLUMNS
    parts += request * blocks * E
    part = tl.sum(gate.to(tl.float32) * value[None, :], axis=1)
    tl.store(parts + tl.program_id(1) * E + expert, part, mask=expert < E)
    if is_last(counters + request, blocks):
        _rank(parts, topk_ids + request * TOP_K, topk_weights + request * TOP_K, blocks, E, PADDED_E, TOP_K, NORMALISE)


@triton.jit
def _rank(  # type: ignore[no-untyped-def]
    parts,
    topk_ids,
    topk_weights,
    BLOCKS: tl.constexpr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """One request's experts by their logit, the lower index first among equal ones, and their weights."""
    expert = tl.arange(0, PADDED_E)
    block = tl.arange(0, BLOCKS)
    # Other programs wrote these: past the first-level cache.
    place = parts + block[:, None] * E + expert[None, :]
    logit = tl.sum(tl.load(place, mask=(expert < E)[None, :], other=0.0, cache_modifier=".cg"), axis=0)
    # NaN has no order; then the first experts are chosen, which exist, and their weights are NaN.
    logit = tl.where((expert < E) & (logit == logit), logit, float("-inf"))
    rank, prob = ranked(logit, expert, TOP_K, E, NORMALISE)
    tl.store(topk_ids + rank, expert, mask=rank < TOP_K)
    tl.store(topk_weights + rank, prob, mask=rank < TOP_K)


def summed_norm(
    source: torch.Tensor,
    tokens: torch.Tensor | None,
    experts: tuple[torch.Tensor, torch.Tensor] | None,
    norm: torch.Tensor,
    stream: torch.Tensor,
    unit: torch.Tensor,
    eps: float,
    use_pdl: bool,
) -> None:
    """Add each request's experts' rows to its row of `source` -> `stream` [B, H] float32 and its RMS norm `unit`.

    Args:
        source: [B, H], or with `tokens` [B] the embeddings [V, H] of those.
        experts: their rows [B * k, H] and weights [B, k]; None adds nothing.
        unit: [B, H] in the weights' dtype.
    """
    batch, width = stream.shape
    rows, topk_weights = (stream, stream) if experts is None else experts
    launch(
        summed_norm_kernel,
        (batch,),
        tuning_at(stream.device).batch_sum_warps,
        use_pdl,
        (source, stream if tokens is None else tokens, rows, topk_weights, norm, stream, unit, eps),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        TOP_K=0 if experts is None else topk_weights.shape[1],
        EMBED=tokens is not None,
    )


def routed_norm(
    stream: torch.Tensor,
    norm: torch.Tensor,
    router: torch.Tensor,
    unit: torch.Tensor,
    topk_ids: torch.Tensor,
    counters: torch.Tensor,
    eps: float,
    normalise: bool,
    use_pdl: bool,
) -> torch.Tensor:
    """The RMS norm of `stream` [B, H] -> `unit`, the best k experts -> `topk_ids` [B, k] int32, and their weights [B,
    k].

    The weights are those of a softmax in float32 over all experts, summing to 1 only where `normalise` says so.

    Args:
        counters: [B] int32, 0 before and after.
    """
    batch, width = stream.shape
    experts, top_k = router.shape[0], topk_ids.shape[1]
    padded, tile = triton.next_power_of_2(width), tuning_at(stream.device).batch_routing
    columns = min(padded, step_of_router(tile.rows, triton.next_power_of_2(experts)))
    parts = torch.empty((batch, padded // columns, experts), dtype=torch.float32, device=stream.device)
    topk_weights = torch.empty((batch, top_k), dtype=torch.float32, device=stream.device)
    launch(
        routed_norm_kernel,
        (batch, padded // columns),
        tile.warps,
        use_pdl,
        (stream, norm, router, unit, parts, counters, topk_ids, topk_weights, eps),
        WIDTH=width,
        PADDED=padded,
        E=experts,
        PADDED_E=triton.next_power_of_2(experts),
        TOP_K=top_k,
        COLUMNS=columns,
        NORMALISE=normalise,
    )
    return topk_weights
