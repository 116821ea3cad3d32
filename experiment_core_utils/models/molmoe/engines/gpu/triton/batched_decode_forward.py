"""One decode step of several requests, which reads each weight once for all of them.

Dense weights are read once for up to 64 requests, each expert's once for all requests that chose it: its rows are
gathered as in a prefill. A block takes eight kernels. The residual stream is float32; the factors of products are in
the weights' dtype, as in the modules. Importing this module needs Triton.
"""

from dataclasses import dataclass

import torch
import triton

from experiment_core_utils.models.molmoe.engines.api import EngineKnobs
from experiment_core_utils.models.molmoe.engines.expert_trace import ExpertRecord
from experiment_core_utils.models.molmoe.engines.gpu.triton.batched_rows import routed_norm, summed_norm
from experiment_core_utils.models.molmoe.engines.gpu.triton.flash_decoding import AttentionBuffers, launch_attention
from experiment_core_utils.models.molmoe.engines.gpu.triton.gemv import launch_next_token
from experiment_core_utils.models.molmoe.engines.gpu.triton.grouped_gemm import expert_rows
from experiment_core_utils.models.molmoe.engines.gpu.triton.small_batch_gemm import small_batch_gemm
from experiment_core_utils.models.molmoe.engines.gpu.triton.tuning import BatchTiles
from experiment_core_utils.models.molmoe.engines.kv_cache import KVCache
from experiment_core_utils.models.molmoe.engines.weights import BlockWeights, DecoderWeights


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


class BatchedStep:
    """One decode step of all requests of a KV cache together.

    Args:
        buffers: for this cache's batch and max_seq_len, made with these tiles.
        use_pdl: whether a kernel may start while the one before it ends; needs Hopper or newer.
    """

    def __init__(
        self, decoder: DecoderWeights, kv_cache: KVCache, buffers: BatchBuffers, tiles: BatchTiles, use_pdl: bool
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._tiles = tiles
        self._use_pdl = use_pdl

    def launch(self, knobs: EngineKnobs) -> torch.Tensor:
        """See `DecodeEngine.step`."""
        decoder, buffers = self._decoder, self._buffers
        norms = [decoder.blocks[index].input_norm for index in knobs.blocks] + [decoder.final_norm]
        summed_norm(decoder.embedding, self._kv_cache.next_tokens, None, norms[0], *self._normed)
        for row, index in enumerate(knobs.blocks):
            block = decoder.blocks[index]
            self._attend(block, row)
            top_k = knobs.top_k if index else decoder.default_top_k
            experts = self._experts(block, buffers.used.ids[index], top_k)
            summed_norm(buffers.stream, None, experts, norms[row + 1], *self._normed)
        best = buffers.best_logits, buffers.best_rows
        small_batch_gemm(buffers.unit, decoder.head, buffers.logits, self._tiles.head, self._use_pdl, best)
        launch_next_token(self._kv_cache, *best, buffers.logits.shape[1], self._use_pdl)
        return buffers.logits

    @property
    def _normed(self) -> tuple[torch.Tensor, torch.Tensor, float, bool]:
        return self._buffers.stream, self._buffers.unit, self._decoder.norm_eps, self._use_pdl

    def _attend(self, block: BlockWeights, row: int) -> None:
        """Attention and output projection of a block: `unit` -> `stream`."""
        buffers, tiles, use_pdl = self._buffers, self._tiles, self._use_pdl
        attention = buffers.attention
        small_batch_gemm(buffers.unit, block.qkv, attention.qkv, tiles.qkv, use_pdl)
        launch_attention(self._decoder, block, self._kv_cache, row, attention, tiles.attention, tiles.splits, use_pdl)
        small_batch_gemm(attention.attended, block.output, buffers.stream, tiles.output, use_pdl, added=True)

    def _experts(self, block: BlockWeights, used: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B * k, H] of each request's experts, and their weights [B, k]."""
        buffers, decoder, use_pdl = self._buffers, self._decoder, self._use_pdl
        # What the experts' products read is the record itself.
        topk_ids = used[: self._kv_cache.batch * top_k].view(-1, top_k)
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
        rows = expert_rows(buffers.unit, block.gate_up, block.down, topk_ids, self._tiles.experts, use_pdl)
        return rows, topk_weights
