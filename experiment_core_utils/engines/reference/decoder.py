"""The reference engines of the prefill, decode step and paused prefill: plain torch in few operations.

No module is called and no cache class made, because these take most of the time where tensors are small. The arithmetic
is that of transformers' blocks of the same form, except for the order of a few float32 roundings. Operations grow with
top-k and with the active blocks: experts that no token chose are not computed.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.api import (
    DecodeEngine,
    PausedPrefillEngine,
    PrefillEngine,
    refuse_without_free_rows,
)
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache, suffix_mask, suffix_positions
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights, RotaryTable
from experiment_core_utils.primitives.errors import ConfigurationError

# Up to so many rows the number of operations counts, beyond it what each of them does.
FEW_ROWS = 8
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class _Reference:
    """The arithmetic that prefill and decode have in common."""

    def __init__(self, decoder: DecoderWeights) -> None:
        self._decoder = decoder
        self._rotary = RotaryTable.of(decoder, 0)
        self._topk_ids: dict[int, torch.Tensor] = {}
        self._eps = decoder.head.new_full((1, 1, 1), decoder.norm_eps)

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        """See `ExpertTrace.topk_expert_ids`; those of the last call, in the order in which the blocks ran.

        T is 1 in the last block of a prefill.
        """
        return self._topk_ids

    def forget_experts(self) -> None:
        self._topk_ids = {}

    def _rotary_for(self, positions: int) -> RotaryTable:
        if len(self._rotary.cosine) < positions:
            self._rotary = RotaryTable.of(self._decoder, positions)
        return self._rotary

    def _rotary_of_next(self, kv_cache: KVCache) -> RotaryTable:
        """The factors of each request's next token."""
        positions = kv_cache.lengths
        if kv_cache.rotary_offsets is not None:
            positions = [sum(each) for each in zip(positions, kv_cache.rotary_offsets, strict=True)]
        table = self._rotary_for(max(kv_cache.max_seq_len, max(positions) + 1))
        if len(positions) == 1:
            return table.rows(slice(positions[0], positions[0] + 1))
        return table.rows(torch.tensor(positions, device=self._decoder.device))

    def _normed(self, states: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm of states [T, W]; the states themselves without a weight."""
        if weight is None:
            return states
        if len(states) > FEW_ROWS or states.dtype != torch.float32:
            return F.rms_norm(states, weight.shape, weight, self._decoder.norm_eps)
        # One operation for the mean square, where `rms_norm` on the CPU makes eight in all.
        square = torch.baddbmm(self._eps, states[:, None], states[:, :, None], alpha=1 / states.shape[1])
        return (states * square[:, 0].rsqrt_()).mul_(weight)

    def _projected(
        self, block: BlockWeights, states: torch.Tensor, rotary: RotaryTable, num_queries: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [A, Q, D] of the last A rows of [T, H], keys and values [KV, T, D], normed and with rotary
        positions.
        """
        decoder, bias = self._decoder, block.qkv_bias
        width, kv_width = decoder.num_heads * decoder.head_width, decoder.num_kv_heads * decoder.head_width
        normed, query_rotary = self._normed(states, block.input_norm), rotary
        if num_queries == len(states):
            queries, keys, values = F.linear(normed, block.qkv, bias).split([width, kv_width, kv_width], dim=1)
        else:
            biases = (None, None) if bias is None else (bias[:width], bias[width:])
            queries = F.linear(normed[-num_queries:], block.qkv[:width], biases[0])
            keys, values = F.linear(normed, block.qkv[width:], biases[1]).split([kv_width, kv_width], dim=1)
            query_rotary = rotary.rows(slice(-num_queries, None))
        queries, keys = self._heads(queries, block.query_norm), self._heads(keys, block.key_norm)
        if block.has_rope:
            queries, keys = query_rotary.applied(queries), rotary.applied(keys)
        return queries, keys, self._heads(values, None)

    def _heads(self, flat: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """Heads [T, N, D] of [T, N * D], normed over the whole width or each alone, as the norm is long."""
        heads = (-1, self._decoder.head_width)
        if norm is None or len(norm) == flat.shape[1]:
            return self._normed(flat, norm).unflatten(1, heads)
        return F.rms_norm(flat.unflatten(1, heads), norm.shape, norm, self._decoder.norm_eps)

    def _attended(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor:
        """Attention of [B, Q, T', D] over [B, KV, T, D] -> [B * T', Q * D]."""
        if queries.shape[2] == 1:
            # The heads that share a key look at it together, as if they were positions.
            together = queries.view(*keys.shape[:2], -1, queries.shape[3])
            attended = F.scaled_dot_product_attention(together, keys, values, attn_mask=mask)
            return attended.reshape(len(queries), -1)
        shares_heads = self._decoder.num_heads != self._decoder.num_kv_heads
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=shares_heads
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _finished(self, index: int, states: torch.Tensor, attended: torch.Tensor, top_k: int) -> torch.Tensor:
        """States after the block, from those after its attention: both residual sums and the mixture of experts."""
        block = self._decoder.blocks[index]
        if block.post_attention_norm is None:
            states = torch.addmm(states, attended, block.output.t())
        else:
            states = states + self._normed(F.linear(attended, block.output), block.post_attention_norm)
        normed = self._normed(states, block.ffn_norm)
        return states + self._normed(self._mixed(index, normed, top_k), block.post_ffn_norm)

    def _mixed(self, index: int, normed: torch.Tensor, top_k: int) -> torch.Tensor:
        """What a block's experts, or its dense layers, make of normed states [T, H]."""
        block = self._decoder.blocks[index]
        if block.router is None:
            mixed = _swiglu(normed, block.gate_up[0], block.down[0])
        else:
            weights, topk_ids = self._routed(block.router, normed, self._decoder.experts_of(index, top_k))
            self._topk_ids[index] = topk_ids
            mixed = (_of_one_row if len(normed) == 1 else _grouped)(block, normed, weights, topk_ids)
        if block.shared_gate_up is None or block.shared_down is None:
            return mixed
        shared = _swiglu(normed, block.shared_gate_up, block.shared_down)
        if block.shared_gate is not None:
            shared = shared * F.linear(normed, block.shared_gate).sigmoid()
        return mixed + shared

    def _routed(self, router: torch.Tensor, normed: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] and experts [T, k] of normed states."""
        topk_weights = torch.softmax(F.linear(normed, router), dim=-1, dtype=torch.float32)
        weights, topk_ids = topk_weights.topk(top_k, dim=-1)
        if self._decoder.normalise_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(normed.dtype), topk_ids

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(self._normed(states, self._decoder.final_norm), self._decoder.head)


class ReferencePrefill(_Reference, PrefillEngine):
    """A `PrefillEngine` that runs anywhere and needs nothing prepared but the rotary factors."""

    def __init__(self, decoder: DecoderWeights) -> None:
        super().__init__(decoder)
        self._mask, self._mask_of = torch.ones(0, 0, dtype=torch.bool), (0, 0)

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        self._rotary_for(kv_cache.max_seq_len)

    @torch.inference_mode()
    def prefill(
        self, embeddings: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0
    ) -> torch.Tensor:
        return self.suffix_logits(embeddings, knobs, kv_cache, request)

    def suffix_logits(
        self, states: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0, ran: int = 0
    ) -> torch.Tensor:
        """Logits [1, V] of the last position, from states [T, H] before the active blocks without the first `ran`.

        Fills the request's positions 0 to T - 1 of those blocks.
        """
        return self._logits(self.through(states, knobs, kv_cache, request, ran, last_alone=True))

    @torch.inference_mode()
    def last_state(
        self,
        embeddings: torch.Tensor,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        rotary: RotaryTable | None = None,
        added: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        states = self.through(embeddings, knobs, kv_cache, last_alone=True, rotary=rotary, added=added)
        return self._normed(states, self._decoder.final_norm)

    def through(
        self,
        states: torch.Tensor,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        request: int = 0,
        ran: int = 0,
        last_alone: bool = False,
        rotary: RotaryTable | None = None,
        added: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """States [T, H] after the blocks of `suffix_logits`; with `last_alone` [1, H] of the last position.

        Args:
            rotary: of the T positions; None for those of positions 0 to T - 1.
            added: states [T, H] to add after each of the first blocks that run.
        """
        tokens = len(states)
        rotary = self._rotary_for(kv_cache.max_seq_len).rows(slice(tokens)) if rotary is None else rotary
        if not ran:
            self._topk_ids = {}
        for row, index in enumerate(knobs.blocks[ran:], ran):
            kept = kv_cache.keys[row, request, :, :tokens], kv_cache.values[row, request, :, :tokens]
            # After the last block only the last position is read.
            num_queries = 1 if last_alone and row == len(knobs.blocks) - 1 else tokens
            states = self._block(index, states, kept, rotary, knobs.top_k, num_queries)
            if row < len(added):
                states = states + added[row][-num_queries:]
        return states[-1:] if last_alone else states

    @torch.inference_mode()
    def suffix_states(
        self, text: torch.Tensor, rows: torch.Tensor, shared: int, blocks: int, kv_cache: KVCache
    ) -> torch.Tensor:
        """States [P, S + R, H] after blocks 0 to P - 1, not normalised, of embeddings [S, H] and [R, H].

        Every block uses the model's own number of experts. Positions of request 0 from `shared` on are overwritten.

        Args:
            text: the prompt's last tokens, at least one.
            rows: each comes after the prompt as if it were alone there.
            shared: tokens of the prompt before them, whose keys and values are in the first `blocks` blocks.

        Raises:
            ConfigurationError: the KV cache is too short, or a block has a window.
        """
        if any(block.window is not None for block in self._decoder.blocks[:blocks]):
            raise ConfigurationError("blocks with a sliding window cannot take up a prompt; run it as a whole")
        last, end = shared + len(text), shared + len(text) + len(rows)
        if end > kv_cache.max_seq_len:
            raise ConfigurationError(
                f"a prompt of {last} tokens and {len(rows)} rows do not fit into a KV cache "
                f"of {kv_cache.max_seq_len} tokens"
            )
        sizes, device = (shared, len(text), len(rows)), kv_cache.keys.device
        rotary = self._rotary_for(kv_cache.max_seq_len).rows(suffix_positions(*sizes).to(device))
        states, seen, suffix = torch.cat([text, rows.to(text.dtype)]), suffix_mask(*sizes).to(device), []
        for index in range(blocks):
            kept = kv_cache.keys[index, 0, :, :end], kv_cache.values[index, 0, :, :end]
            states = self._block(index, states, kept, rotary, self._decoder.default_top_k, len(states), seen)
            suffix.append(states)
        return torch.stack(suffix)

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
        """States [A, H] of the last A positions after a block, from [T, H].

        Args:
            kept: both [KV, E, D], E at least T; the block's keys and values go into the last T positions.
            seen: [T, E], which positions each row looks at, for A = T; None for all up to its own, of E = T.
        """
        found = self._projected(self._decoder.blocks[index], states, rotary, num_queries)
        queries, *new = (heads.transpose(0, 1) for heads in found)
        for cache, own in zip(kept, new, strict=True):
            cache[:, -len(states) :] = own
        # Read back from the KV cache, where a head's rows are neighbours.
        keys, values = kept
        window = self._decoder.blocks[index].window
        if window is not None and seen is None and window < len(states):
            if num_queries == 1:
                keys, values = keys[:, -window:], values[:, -window:]
            else:
                seen = self._window_mask(len(states), window)
        is_causal = seen is None and num_queries > 1
        attended = self._attended(queries[None], keys[None], values[None], seen, is_causal)
        return self._finished(index, states[-num_queries:], attended, top_k)


    def _window_mask(self, tokens: int, window: int) -> torch.Tensor:
        """The mask [T, T] of positions that see themselves and the window - 1 before them; kept for the next block."""
        if self._mask_of != (tokens, window):
            seen = torch.ones(tokens, tokens, dtype=torch.bool, device=self._decoder.device)
            self._mask, self._mask_of = seen.tril_().triu_(1 - window), (tokens, window)
        return self._mask


class ReferenceDecode(_Reference, DecodeEngine):
    """A `DecodeEngine` that runs anywhere and needs nothing prepared but the rotary factors.

    It goes by the lengths that the host knows.
    """

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache) -> None:
        self._rotary_for(kv_cache.max_seq_len)

    @torch.inference_mode()
    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        places = _Places(kv_cache)
        rotary = self._rotary_of_next(kv_cache)
        states = F.embedding(kv_cache.next_tokens, self._decoder.embedding)
        self._topk_ids = {}
        for row, index in enumerate(knobs.blocks):
            block = self._decoder.blocks[index]
            queries, keys, values = self._projected(block, states, rotary, len(states))
            used_keys = places.written(kv_cache.keys[row], keys, block.window)
            used_values = places.written(kv_cache.values[row], values, block.window)
            mask = places.mask(block.window)
            attended = self._attended(queries[:, :, None], used_keys, used_values, mask, causal=False)
            states = self._finished(index, states, attended, knobs.top_k)
        logits = self._logits(states)
        kv_cache.put_likeliest(logits)
        kv_cache.device_lengths += 1
        return logits


class _Places:
    """The place of each request's next token in a KV cache, and the positions that it sees."""

    def __init__(self, kv_cache: KVCache) -> None:
        lengths = kv_cache.lengths
        self._end = max(lengths) + 1
        self._is_alone, self._are_alike = len(lengths) == 1, min(lengths) == max(lengths)
        self._masks: dict[int | None, torch.Tensor] = {}
        if not self._is_alone:
            device = kv_cache.keys.device
            self._positions = torch.tensor(lengths, device=device)
            self._requests = torch.arange(len(lengths), device=device)

    def _first(self, window: int | None) -> int:
        """The first position that is looked at, where all requests see the same ones."""
        return max(0, self._end - window) if window is not None and self._are_alike else 0

    def mask(self, window: int | None) -> torch.Tensor | None:
        """What each request sees of the positions that `written` gives, [B, 1, 1, T]; None where that is all."""
        if self._are_alike:
            return None
        if window not in self._masks:
            places = torch.arange(self._end, device=self._positions.device)
            seen = places <= self._positions[:, None]
            if window is not None:
                seen &= places > self._positions[:, None] - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]

    def written(self, max_seq_len: torch.Tensor, new: torch.Tensor, window: int | None) -> torch.Tensor:
        """Write `new` [B, KV, D] into [B, KV, T, D]; returns the positions in use, the new one among them, from the
        first one on that is in the window.
        """
        if self._is_alone:
            max_seq_len[:, :, self._end - 1] = new
        else:
            max_seq_len[self._requests, :, self._positions] = new
        return max_seq_len[:, :, self._first(window) : self._end]


def _swiglu(normed: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A dense layer of normed states [T, H] -> [T, H]."""
    gate, up = F.linear(normed, gate_up).chunk(2, dim=1)
    return F.linear(F.silu(gate).mul_(up), down)


def _of_one_row(
    block: BlockWeights, normed: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Output [1, H] of one row's experts [1, H]: each weight is read once, in place."""
    experts = topk_ids[0].tolist()
    row = normed[0]
    hidden = torch.stack([torch.mv(block.gate_up[expert], row) for expert in experts])
    gate, up = hidden.chunk(2, dim=1)
    activated = F.silu(gate).mul_(up).mul_(weights.t())
    mixed = torch.zeros_like(row)
    for expert, activation in zip(experts, activated, strict=True):
        mixed.addmv_(block.down[expert], activation)
    return mixed[None]


def _grouped(block: BlockWeights, normed: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Experts of many rows [T, H] -> [T, H]: rows sorted by expert, one product an expert, weighted sums back."""
    order, counts, places = _by_expert(topk_ids, block.num_experts)
    given = normed.index_select(0, order // topk_ids.shape[1])
    hidden = given.new_empty(len(order), block.gate_up.shape[1])
    _products_by_expert(given, block.gate_up, counts, hidden)
    gate, up = hidden.chunk(2, dim=1)
    # `given` has had its use and has the shape that is wanted.
    _products_by_expert(F.silu(gate).mul_(up), block.down, counts, given)
    if given.dtype == torch.float32:
        return F.embedding_bag(places, given, mode="sum", per_sample_weights=weights)
    return (given.index_select(0, places.flatten()).unflatten(0, topk_ids.shape) * weights[..., None]).sum(dim=1)


def _by_expert(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Experts [T, k] -> the order that sorts them [T * k], each expert's number, and where each went [T, k]."""
    flat = topk_ids.flatten()
    order = flat.argsort()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, torch.bincount(flat, minlength=num_experts).tolist(), places.view_as(topk_ids)


def _products_by_expert(given: torch.Tensor, factors: torch.Tensor, counts: list[int], out: torch.Tensor) -> None:
    """Rows in groups of `counts`, each times its factor [N, K] transposed, into `out`."""
    for rows, factor, place in zip(given.split(counts), factors, out.split(counts), strict=True):
        if len(rows):
            torch.mm(rows, factor.t(), out=place)


class ReferencePausedPrefill(PausedPrefillEngine):
    """A `PausedPrefillEngine` for decoders whose whole prefills are the reference.

    Args:
        blocks: that run the whole ones; what they note of experts is of the last call.
    """

    def __init__(self, decoder: DecoderWeights, blocks: ReferencePrefill) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._paused = decoder.embedding[:0]
        self._ran = 0

    def warm_up(self, pause: int, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        refuse_without_free_rows(tokens, kv_cache)
        self._blocks.warm_up(knobs, kv_cache, tokens + 1)

    @torch.inference_mode()
    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        tokens = len(embeddings)
        refuse_without_free_rows(tokens, kv_cache)
        given = embeddings if appended is None else torch.cat([embeddings, appended[None].to(embeddings.dtype)])
        first = EngineKnobs(self._decoder.default_top_k, tuple(range(pause)))
        states = self._blocks.through(given, first, kv_cache)
        self._paused, self._ran = states[:tokens], pause
        return states[tokens - 1 :]

    @torch.inference_mode()
    def finish(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        return self._blocks.suffix_logits(self._paused, knobs, kv_cache, ran=self._ran)
