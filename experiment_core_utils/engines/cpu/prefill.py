"""The cpu engines of the prefill, in float32 with compiled kernels.

Between its matrix products a block passes over each row once, where plain torch does so for every operation, and writes
into memory that is kept between requests. The last block, of which only one position is needed, is that of
`ReferencePrefill`.
"""

import torch

from experiment_core_utils.engines.cpu.attention import cpu_attention
from experiment_core_utils.engines.cpu.decoder_block import decoder_block_kernel
from experiment_core_utils.engines.cpu.panels import Workspace, refuse_other_places
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import (
    KeysAndValues,
    ReferencePrefill,
    RotaryTable,
)
from experiment_core_utils.engines.weights import DecoderWeights


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
        self._kernels = [decoder_block_kernel(each, eps, decoder.normalise_top_k, memory) for each in decoder.blocks]

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
        if num_queries < len(states):
            return super()._block(index, states, kept, rotary, top_k, num_queries, seen)
        kernel, given, decoder = self._kernels[index], states.contiguous(), self._decoder
        own = kept[0][:, -len(states) :], kept[1][:, -len(states) :]
        queries = kernel.project(given, (rotary.cosine, rotary.sine), own, decoder.num_heads)
        batched = queries[None], kept[0][None], kept[1][None]
        attended = self._attention(*batched, True)[0] if seen is None else self._attended(*batched, seen, causal=False)
        states, self._topk_ids[index] = kernel.finish(given, attended, top_k if index else decoder.default_top_k)
        return states
