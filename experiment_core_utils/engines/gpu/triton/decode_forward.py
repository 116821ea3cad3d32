"""One decode step, launched on the current stream.

It takes five kernels a block, two more for a shared expert or for norms behind its parts, and two after the last one.
Activations between kernels are float32 (except the experts' products, which are in the weights' dtype), so a bfloat16
model rounds less often than its modules do. Importing this module needs Triton.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.gpu.triton import gemv as dense_products
from experiment_core_utils.engines.gpu.triton import moe_gemv as mixture
from experiment_core_utils.engines.gpu.triton.flash_decoding import AttentionBuffers, launch_attention
from experiment_core_utils.engines.gpu.triton.gemv import launch, launch_next_token
from experiment_core_utils.engines.gpu.triton.tuning import StepTiles, Tile, tuning_at
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights


@dataclass(frozen=True)
class StepBuffers:
    """Buffers between the kernels of a step: B requests, S splits, T positions; float32 unless noted."""

    stream: torch.Tensor  # [B, H] the residual stream
    part: torch.Tensor  # [B, H], what a block adds where a norm is behind it
    attention: AttentionBuffers  # with float32 for what the heads attended to
    router_parts: torch.Tensor  # [B, blocks of the output projection, E]
    squares: torch.Tensor  # [B, blocks of the output projection]
    counters: torch.Tensor  # [B] int32, 0 between kernels
    spread: torch.Tensor  # [B]
    topk_ids: torch.Tensor  # [B, E] int32, the experts by rank
    topk_weights: torch.Tensor  # [B, E], their weights
    used: ExpertRecord  # of B tokens, whose products were taken
    products: torch.Tensor  # [B, E, I] in the weights' dtype, for up to E choices of any block
    shared_products: torch.Tensor  # [B, J] in the weights' dtype
    opened: torch.Tensor  # [B], the weight of a shared expert that is gated
    logits: torch.Tensor  # [B, V]
    best_logits: torch.Tensor  # [B, blocks of the head]
    best_rows: torch.Tensor  # [B, blocks of the head] int32

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, decoder: DecoderWeights, batch: int, max_seq_len: int, tiles: StepTiles) -> "StepBuffers":
        """The buffers, beside the decoder's weights, for every setting of a KV cache of this size."""

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=decoder.device)

        rows = decoder.head.shape[0]
        blocks = triton.cdiv(rows, tiles.head.rows)
        parts = triton.cdiv(decoder.width, tiles.output.rows)
        shared = max(0 if each.shared_down is None else each.shared_down.shape[1] for each in decoder.blocks)
        return cls(
            stream=floats(batch, decoder.width),
            part=floats(batch, decoder.width),
            attention=AttentionBuffers.allocate(decoder, batch, max_seq_len, tiles.splits, torch.float32),
            router_parts=floats(batch, parts, decoder.num_experts),
            squares=floats(batch, parts),
            counters=torch.zeros(batch, dtype=torch.int32, device=decoder.device),
            spread=floats(batch),
            # Zeros are experts, should the logits be NaN and none be ranked.
            topk_ids=torch.zeros((batch, decoder.num_experts), dtype=torch.int32, device=decoder.device),
            topk_weights=floats(batch, decoder.num_experts),
            used=ExpertRecord.allocate(decoder, batch * decoder.num_experts),
            products=floats(batch, max(block.gate_up.shape[0] * block.down.shape[2] for block in decoder.blocks)).to(
                decoder.dtype
            ),
            shared_products=floats(batch, shared).to(decoder.dtype),
            opened=floats(batch),
            logits=floats(batch, rows),
            best_logits=floats(batch, blocks),
            best_rows=torch.empty((batch, blocks), dtype=torch.int32, device=decoder.device),
        )


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of all requests of a KV cache, each served separately."""

    decoder: DecoderWeights
    kv_cache: KVCache
    buffers: StepBuffers  #: for this cache's batch and max_seq_len, made with `tiles` of the same splits and head
    tiles: StepTiles
    #: whether a kernel may start, and read its weights, while the one before it ends; needs Hopper or newer
    use_pdl: bool

    def launch(self, knobs: EngineKnobs) -> torch.Tensor:
        decoder, buffers = self.decoder, self.buffers
        for row, index in enumerate(knobs.blocks):
            block = decoder.blocks[index]
            # The first block that runs reads the tokens' embeddings, and writes the stream.
            source = decoder.embedding if row == 0 else buffers.stream
            self.launch_qkv(block, source, embed=row == 0)
            top_k = decoder.experts_of(index, knobs.top_k)
            self.launch_attention(block, row, self._read_later(knobs, row))
            if block.post_attention_norm is None:
                self.launch_output(block, source, top_k, embed=row == 0)
            else:
                self._product(block.output, buffers.attention.attended, self.tiles.output, buffers.part)
                self._add_normed(block.post_attention_norm, source, embed=row == 0)
            self.launch_gate_up(block, buffers.used.ids[index], top_k)
            if block.shared_gate_up is not None:
                self.launch_shared_gate_up(block)
            self.launch_down(block, top_k)
            if block.shared_gate_up is not None:
                self.launch_shared_down(block)
            if block.post_ffn_norm is not None:
                self._add_normed(block.post_ffn_norm, buffers.stream)
        self.launch_head()
        self.launch_next_token()
        return buffers.logits

    def _read_later(self, knobs: EngineKnobs, row: int) -> torch.Tensor | None:
        """The next weight behind a block's output product that is read whatever the router chooses; None without PDL,
        where kernels' own loads do not overlap either, and for several requests, which would all ask for it.
        """
        if not self.use_pdl or self.kv_cache.batch > 1:
            return None
        block = self.decoder.blocks[knobs.blocks[row]]
        if block.router is None:
            return block.gate_up
        if row + 1 == len(knobs.blocks):
            return self.decoder.head
        return self.decoder.blocks[knobs.blocks[row + 1]].qkv

    def _launch(self, kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: tuple[Any, ...], **sizes: Any) -> None:
        launch(kernel, grid, tile.warps, self.use_pdl, arguments, **sizes)

    def launch_qkv(self, block: BlockWeights, source: torch.Tensor, embed: bool) -> None:
        qkv = self.buffers.attention.qkv
        self._product(block.qkv, source, self.tiles.qkv, qkv, block.input_norm, block.qkv_bias, embed)

    def _product(
        self,
        weight: torch.Tensor,
        source: torch.Tensor,
        tile: Tile,
        output: torch.Tensor,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        embed: bool = False,
    ) -> None:
        rows, width = weight.shape
        self._launch(
            dense_products.normed_product_kernel,
            (self.kv_cache.batch, triton.cdiv(rows, tile.rows * tile.steps)),
            tile,
            (
                source,
                self.kv_cache.next_tokens,
                # What a block has not is not read.
                weight if norm is None else norm,
                weight,
                weight if bias is None else bias,
                output,
                rows,
                self.decoder.norm_eps,
            ),
            **self._width(rows, tile, width),
            STEPS=tile.steps,
            BIASED=bias is not None,
            NORMED=norm is not None,
            EMBED=embed,
        )

    def _add_normed(self, norm: torch.Tensor, source: torch.Tensor, embed: bool = False) -> None:
        decoder, buffers = self.decoder, self.buffers
        launch(
            dense_products.add_normed_kernel,
            (self.kv_cache.batch,),
            tuning_at(decoder.device).next_token_warps,
            self.use_pdl,
            (buffers.part, norm, source, self.kv_cache.next_tokens, buffers.stream, decoder.norm_eps),
            WIDTH=decoder.width,
            PADDED=triton.next_power_of_2(decoder.width),
            EMBED=embed,
        )

    def _width(self, rows: int, tile: Tile, width: int | None = None) -> dict[str, Any]:
        width = self.decoder.width if width is None else width
        padded = triton.next_power_of_2(width)
        return {
            "WIDTH": width,
            "PADDED": padded,
            "BLOCK": tile.rows,
            "EXACT": padded == width and rows % (tile.rows * tile.steps) == 0,
        }

    def launch_attention(self, block: BlockWeights, row: int, following: torch.Tensor | None = None) -> None:
        """See `launch_attention` of flash_decoding.py, also for `following`."""
        tile, splits, buffers = self.tiles.attention, self.tiles.splits, self.buffers.attention
        launch_attention(self.decoder, block, self.kv_cache, row, buffers, tile, splits, self.use_pdl, following)

    def launch_output(self, block: BlockWeights, source: torch.Tensor, top_k: int, embed: bool) -> None:
        decoder, buffers, tile = self.decoder, self.buffers, self.tiles.output
        rows, attended = block.output.shape
        padded, blocks = triton.next_power_of_2(attended), triton.cdiv(rows, tile.rows)
        routing = (buffers.router_parts, buffers.squares, buffers.counters)
        parts, experts = tuning_at(decoder.device).router_parts, block.num_experts
        self._launch(
            mixture.output_kernel,
            (self.kv_cache.batch, blocks),
            tile,
            (
                buffers.attention.attended,
                block.output,
                source,
                self.kv_cache.next_tokens,
                buffers.stream,
                block.ffn_norm,
                block.output if block.router is None else block.router,
                *routing,
                buffers.spread,
                buffers.topk_ids,
                buffers.topk_weights,
                rows,
                top_k,
                decoder.norm_eps,
            ),
            WIDTH=attended,
            PADDED=padded,
            BLOCK=tile.rows,
            EXACT=padded == attended and rows % tile.rows == 0,
            E=experts,
            PADDED_E=triton.next_power_of_2(experts),
            PADDED_P=triton.next_power_of_2(blocks),
            AT_ONCE=min(triton.next_power_of_2(blocks), parts // triton.next_power_of_2(experts)),
            NORMALISE=decoder.normalise_top_k,
            DENSE=block.router is None,
            EMBED=embed,
        )

    def launch_gate_up(self, block: BlockWeights, used: torch.Tensor, top_k: int) -> None:
        dense = block.router is None
        self._gate_up(block, block.gate_up, self.buffers.products, used, top_k, dense)

    def launch_shared_gate_up(self, block: BlockWeights) -> None:
        # It is no expert that is chosen, and so noted nowhere.
        used = self.buffers.topk_ids
        self._gate_up(block, block.shared_gate_up, self.buffers.shared_products, used, 1, True, block.shared_gate)

    def _gate_up(
        self,
        block: BlockWeights,
        weight: Any,
        products: torch.Tensor,
        used: torch.Tensor,
        top_k: int,
        dense: bool,
        gate: torch.Tensor | None = None,
    ) -> None:
        buffers, tile = self.buffers, self.tiles.dense_gate_up if dense else self.tiles.gate_up
        inner = weight.shape[-2] // 2
        self._launch(
            mixture.gate_up_kernel,
            (self.kv_cache.batch * top_k, triton.cdiv(inner, tile.rows * tile.steps)),
            tile,
            (
                buffers.stream,
                # What a block has not is not read.
                weight if block.ffn_norm is None else block.ffn_norm,
                buffers.spread,
                buffers.topk_ids,
                weight,
                products,
                used,
                weight if gate is None else gate,
                buffers.opened,
                top_k,
            ),
            E=block.num_experts,
            INNER=inner,
            **self._width(inner, tile),
            STEPS=tile.steps,
            DENSE=dense,
            GATED=gate is not None,
            NORMED=block.ffn_norm is not None,
        )

    def launch_down(self, block: BlockWeights, top_k: int) -> None:
        self._down(block, block.down, self.buffers.products, top_k, block.router is None)

    def launch_shared_down(self, block: BlockWeights) -> None:
        is_gated = block.shared_gate is not None
        self._down(block, block.shared_down, self.buffers.shared_products, 1, True, is_gated)

    def _down(
        self, block: BlockWeights, weight: Any, products: torch.Tensor, top_k: int, dense: bool, is_gated: bool = False
    ) -> None:
        decoder, buffers, tile = self.decoder, self.buffers, self.tiles.down
        rows, inner = decoder.width, weight.shape[-1]
        summed = buffers.stream if block.post_ffn_norm is None else buffers.part
        padded, tuned = triton.next_power_of_2(inner), tuning_at(decoder.device)
        if dense or padded > tuned.whole_columns:
            padded = min(padded, tuned.dense_columns)
        self._launch(
            mixture.down_kernel,
            (self.kv_cache.batch, triton.cdiv(rows, tile.rows)),
            tile,
            (buffers.topk_ids, buffers.topk_weights, products, weight, buffers.opened, summed, rows),
            E=block.num_experts,
            TOP_K=1 if dense else top_k,
            PARTS=triton.cdiv(inner, padded),
            AT_ONCE=tuned.slots_at_once,
            INNER=inner,
            PADDED=padded,
            BLOCK=tile.rows,
            EXACT=inner % padded == 0 and rows % tile.rows == 0,
            DENSE=dense,
            GATED=is_gated,
            ADDED=block.post_ffn_norm is None,
        )

    def launch_head(self) -> None:
        decoder, buffers, tile = self.decoder, self.buffers, self.tiles.head
        rows = decoder.head.shape[0]
        self._launch(
            dense_products.head_kernel,
            (self.kv_cache.batch, triton.cdiv(rows, tile.rows)),
            tile,
            (
                buffers.stream,
                decoder.final_norm,
                decoder.head,
                buffers.logits,
                buffers.best_logits,
                buffers.best_rows,
                rows,
                decoder.norm_eps,
            ),
            **self._width(rows, tile),
        )

    def launch_next_token(self) -> None:
        buffers = self.buffers
        launch_next_token(self.kv_cache, buffers.best_logits, buffers.best_rows, buffers.logits.shape[1], self.use_pdl)
