"""In: packed weights and a store, float32 on the CPU; out: logits of the next token, by one compiled call a step."""

import torch
from torch.nn import functional as F

from experiment_core_utils.models.molmoe.cpu_kernels.decode_step import DecodeStepKernel
from experiment_core_utils.models.molmoe.cpu_kernels.rows import refuse_other_places
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KVCache
from experiment_core_utils.models.molmoe.packed_blocks import DecoderWeights
from experiment_core_utils.models.molmoe.straight_decoder import ReferenceDecode


class CpuDecode(ReferenceDecode):
    """A `DecodeEngine`; stores of several requests go the way of `ReferenceDecode`.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernel cannot be compiled here.
    """

    def __init__(self, decoder: DecoderWeights) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        self._kernel = DecodeStepKernel(decoder)

    @torch.inference_mode()
    def step(self, knobs: DecoderKnobs, kv_cache: KVCache) -> torch.Tensor:
        """See `DecodeEngine.step`."""
        if kv_cache.batch != 1:
            return super().step(knobs, kv_cache)
        at = kv_cache.lengths[0]
        rotary = self._rotary_for(kv_cache.max_seq_len).rows(slice(at, at + 1))
        experts = [knobs.top_k if index else self._decoder.default_top_k for index in knobs.blocks]
        state = F.embedding(kv_cache.next_tokens, self._decoder.embedding)
        cos_sin = rotary.cosine, rotary.sine
        logits, topk_ids = self._kernel.step(state, cos_sin, kv_cache, knobs.blocks, experts)
        self._topk_ids = dict(zip(knobs.blocks, topk_ids, strict=True))
        kv_cache.next_tokens.copy_(logits.argmax(dim=-1))
        kv_cache.device_lengths += 1
        return logits
