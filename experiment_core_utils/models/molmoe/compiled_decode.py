"""In: packed weights and a store, float32 on the CPU; out: logits of the next token, by one compiled call a step."""

import torch
from torch.nn import functional as F

from experiment_core_utils.models.molmoe.cpu_kernels.decode_step import DecodeStepKernel
from experiment_core_utils.models.molmoe.cpu_kernels.rows import refuse_other_places
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedDecoder
from experiment_core_utils.models.molmoe.straight_decoder import StraightDecode


class CompiledDecode(StraightDecode):
    """A `DecodeEngine`; stores of several requests go the way of `StraightDecode`.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernel cannot be compiled here.
    """

    def __init__(self, decoder: PackedDecoder) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        self._kernel = DecodeStepKernel(decoder)

    @torch.inference_mode()
    def step(self, knobs: DecoderKnobs, store: KeyValueStore) -> torch.Tensor:
        """See `DecodeEngine.step`."""
        if store.batch != 1:
            return super().step(knobs, store)
        at = store.lengths[0]
        rotary = self._rotary_for(store.slots).rows(slice(at, at + 1))
        experts = [knobs.top_k if index else self._decoder.default_top_k for index in knobs.blocks]
        state = F.embedding(store.next_tokens, self._decoder.embedding)
        turn = rotary.cosine, rotary.sine
        logits, chosen = self._kernel.step(state, turn, store, knobs.blocks, experts)
        self._chosen = dict(zip(knobs.blocks, chosen, strict=True))
        store.next_tokens.copy_(logits.argmax(dim=-1))
        store.device_lengths += 1
        return logits
