"""The cpu engines of the prefill, in float32 with compiled kernels.

Between its matrix products a block passes over each row once, where plain torch does so for every operation, and writes
into memory that is kept between requests. Of the last block, of which only one position is needed, plain torch
computes all but keys and values.
"""

import torch

from experiment_core_utils.engines.cpu.attention import cpu_attention
from experiment_core_utils.engines.cpu.decoder_block import DecoderBlockKernel
from experiment_core_utils.engines.cpu.panels import Workspace, refuse_other_places
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import KeysAndValues, ReferencePrefill
from experiment_core_utils.engines.weights import DecoderWeights, RotaryTable


class CpuPrefill(ReferencePrefill):
    """A `PrefillEngine` with compiled row operations; `warm_up` allocates the workspace for prompts of that length.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernels cannot be compiled for it here.
    """

    def __init__(self, decoder: DecoderWeights) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        self._attention = cpu_attention(decoder.head_width)
        memory, eps = Workspace(), decoder.norm_eps
        self._kernels = [DecoderBlockKernel(each, eps, decoder.normalise_top_k, memory) for each in decoder.blocks]

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        super().warm_up(knobs, kv_cache, tokens)
        top_k = max(knobs.top_k, self._decoder.default_top_k)
        self._kernels[0].reserve(tokens, top_k, self._decoder.num_heads, self._decoder.head_width)

    def _block(
        self,
        index: int,
        states: torch.Tensor,
        kept: KeysAndValues,
        rotary: RotaryTable,
        top_k: int,
        num_queries: int,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel, given, decoder = self._kernels[index], states.contiguous(), self._decoder
        window, is_last_alone = decoder.blocks[index].window, num_queries == 1 < len(states)
        own = kept[0][:, -len(states) :], kept[1][:, -len(states) :]
        queries = kernel.project(given, (rotary.cosine, rotary.sine), own, 0 if is_last_alone else decoder.num_heads)
        if is_last_alone:
            alone = self._projected(decoder.blocks[index], states[-1:], rotary.rows(slice(-1, None)), 1)[0]
            keys, values = (each[None, :, -(window or 0) :] for each in kept)
            attended = self._attended(alone.transpose(0, 1)[None], keys, values, None, causal=False)
            return self._finished(index, states[-1:], attended, top_k)
        batched = queries[None], kept[0][None], kept[1][None]
        if seen is None:
            attended = self._attention(*batched, True, window)[0]
        else:
            attended = self._attended(*batched, seen, causal=False)
        states, topk_ids = kernel.finish(given, attended, decoder.experts_of(index, top_k))
        if index in decoder.routed_blocks:
            self._topk_ids[index] = topk_ids
        return states
