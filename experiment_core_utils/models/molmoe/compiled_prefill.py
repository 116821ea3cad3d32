"""In: packed weights, a store and embeddings, all float32 on the CPU; out: a prompt's logits, with compiled kernels.

Between its products a block passes over each row once, where plain torch does so for every operation, and writes into
memory that is kept between requests. The last block, of which one position is asked for, is that of `StraightPrefill`.
"""

import torch

from experiment_core_utils.models.molmoe.cpu_kernels.attention import compiled_attention
from experiment_core_utils.models.molmoe.cpu_kernels.rooms import Rooms
from experiment_core_utils.models.molmoe.cpu_kernels.rows import refuse_other_places, row_kernels
from experiment_core_utils.models.molmoe.engines import DecoderKnobs
from experiment_core_utils.models.molmoe.key_value_store import KeyValueStore
from experiment_core_utils.models.molmoe.packed_blocks import PackedBlock, PackedDecoder
from experiment_core_utils.models.molmoe.straight_decoder import (
    KeysAndValues,
    RotaryTable,
    StraightPrefill,
    by_expert,
    products_by_expert,
)


class CompiledPrefill(StraightPrefill):
    """A `PrefillEngine`; `make_ready` takes the memory that prompts of that length work in.

    Raises:
        ConfigurationError: the decoder is not in float32 on the CPU, or the kernels cannot be compiled for it here.
    """

    def __init__(self, decoder: PackedDecoder) -> None:
        super().__init__(decoder)
        refuse_other_places(decoder.device, decoder.dtype)
        self._attention = compiled_attention(decoder.head_width)
        self._kernels = row_kernels()
        self._memory = Rooms()

    def make_ready(self, knobs: DecoderKnobs, store: KeyValueStore, tokens: int) -> None:
        """See `PrefillEngine.make_ready`."""
        super().make_ready(knobs, store, tokens)
        self._rooms(tokens, max(knobs.top_k, self._decoder.default_top_k))

    def _rooms(self, tokens: int, top_k: int) -> dict[str, torch.Tensor]:
        decoder = self._decoder
        sizes = {
            "normed": (tokens, decoder.width),
            "joint": (tokens, len(decoder.blocks[0].qkv)),
            "queries": (decoder.num_heads, tokens, decoder.head_width),
            "given": (tokens * top_k, decoder.width),
            "hidden": (tokens * top_k, 2 * decoder.expert_width),
            "gated": (tokens * top_k, decoder.expert_width),
        }
        return {name: self._memory.room(name, *size) for name, size in sizes.items()}

    def _block(
        self, index: int, states: torch.Tensor, kept: KeysAndValues, rotary: RotaryTable, top_k: int
    ) -> torch.Tensor:
        decoder, kernels = self._decoder, self._kernels
        block, eps = decoder.blocks[index], decoder.norm_eps
        own_top_k = top_k if index else decoder.default_top_k
        rooms = self._rooms(len(states), own_top_k)
        normed, queries = rooms["normed"], rooms["queries"]
        kernels.normalise(states, block.input_norm, eps, normed)
        torch.mm(normed, block.qkv.t(), out=rooms["joint"])
        norms, turns = (block.query_norm, block.key_norm), (rotary.cosine, rotary.sine)
        kernels.place(rooms["joint"], norms, turns, eps, (queries, *kept))
        attended = self._attention(queries[None], kept[0][None], kept[1][None], True)[0]
        states = torch.addmm(states, attended, block.output.t())
        kernels.normalise(states, block.ffn_norm, eps, normed)
        weights, self._chosen[index] = self._routed(block, normed, own_top_k)
        return self._mixed(block, states, weights, self._chosen[index], rooms)

    def _mixed(
        self,
        block: PackedBlock,
        states: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        rooms: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The experts' weighted sums, added to the states where they lie."""
        order, counts, places = by_expert(chosen, self._decoder.num_experts)
        given, hidden = rooms["given"], rooms["hidden"]
        torch.index_select(rooms["normed"], 0, order // chosen.shape[1], out=given)
        products_by_expert(given, block.gate_up, counts, hidden)
        products_by_expert(self._kernels.gate(hidden, rooms["gated"]), block.down, counts, given)
        return self._kernels.add_weighted(given, places, weights, states)
