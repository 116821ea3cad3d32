"""Operations of a text decoder by formula, from its shape and token counts.

Convention: one multiply-add is 2 operations. Attention counts the full rectangle of queries and keys, although a causal
kernel may skip half of it in prefill; a sliding window narrows it in decode only, where the cache contains no more keys
than the window. Not counted: look-ups, norms, rotary positions, softmax, biases, the elementwise product of gated
units, sorting experts; positions of padding, and those of a static cache without a token.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.primitives.errors import ConfigurationError


@dataclass(frozen=True)
class ExpertsShape:
    """Routed experts of a block; each has three products (gated)."""

    num_experts: int  #: that the router chooses from
    top_k: int  #: that run for a token
    width: int  #: inner width of each
    shared_width: int = 0  #: inner width of the gated MLP that runs for every token beside them; 0 without one
    has_shared_gate: bool = False  #: whether a product with one column weighs the shared part

    def products(self, hidden: int) -> int:
        """Multiply-adds for a token of width `hidden`."""
        return self._products(hidden, self.top_k)

    def weights(self, hidden: int) -> int:
        """Elements of all matrices, including experts that do not run for a token."""
        return self._products(hidden, self.num_experts)

    def _products(self, hidden: int, num_running: int) -> int:
        router = hidden * (self.num_experts + self.has_shared_gate)
        return router + 3 * hidden * (num_running * self.width + self.shared_width)


@dataclass(frozen=True)
class MlpShape:
    """A dense MLP: three products where it is gated (SwiGLU), two where it is plain."""

    width: int
    is_gated: bool = True

    def products(self, hidden: int) -> int:
        """Multiply-adds for a token of width `hidden`."""
        return (3 if self.is_gated else 2) * hidden * self.width

    def weights(self, hidden: int) -> int:
        """Elements of all matrices."""
        return self.products(hidden)


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-AI 2024, *DeepSeek-V2*, section 2.1): the cache has compressed keys and
    values, which each forward pass expands again for every key that it sees.
    """

    query_rank: int | None  #: width that queries are compressed to; None where they are not
    kv_rank: int  #: width that keys and values are compressed to
    rotary_width: int  #: of the part of a key that has a position, common to all heads
    expanded_width: int  #: heads * (head size of keys without that part + head size of values)
    value_width: int  #: heads * head size of values

    def token_products(self, hidden: int, query_width: int) -> int:
        """Multiply-adds for a token: its query, its compressed key and value, and the output."""
        query = hidden * query_width if self.query_rank is None else self.query_rank * (hidden + query_width)
        return query + hidden * (self.kv_rank + self.rotary_width) + self.value_width * hidden

    @property
    def key_products(self) -> int:
        """Multiply-adds that expand a key and its value."""
        return self.kv_rank * self.expanded_width


@dataclass(frozen=True)
class BlockShape:
    """A transformer block."""

    query_width: int  #: heads * head size
    kv_width: int  #: key-value heads * head size, of latent attention after expansion
    window: int | None  #: most keys that a decode step sees; None without a limit
    mlp: MlpShape | ExpertsShape
    latent: LatentShape | None = None  #: None for attention whose cache contains keys and values themselves

    def token_products(self, hidden: int) -> int:
        """Multiply-adds for a token of width `hidden`, whatever it attends to."""
        return self._attention_products(hidden) + self.mlp.products(hidden)

    @property
    def key_products(self) -> int:
        """Multiply-adds for each key that a forward pass sees, whatever the number of tokens that see it."""
        return 0 if self.latent is None else self.latent.key_products

    @property
    def pair_products(self) -> int:
        """Multiply-adds for each token and each key that it sees: scores and values."""
        return self.query_width + (self.query_width if self.latent is None else self.latent.value_width)

    @property
    def cache_width(self) -> int:
        """Elements of a position in the cache."""
        return 2 * self.kv_width if self.latent is None else self.latent.kv_rank + self.latent.rotary_width

    def weights(self, hidden: int) -> int:
        """Elements of all matrices of the block."""
        return self._attention_products(hidden) + self.key_products + self.mlp.weights(hidden)

    def _attention_products(self, hidden: int) -> int:
        if self.latent is not None:
            return self.latent.token_products(hidden, self.query_width)
        return 2 * hidden * (self.query_width + self.kv_width)

    def with_top_k(self, top_k: int) -> "BlockShape":
        """The block with `top_k` experts for a token, or unchanged if it is dense. Raises ConfigurationError for too
        many experts.
        """
        if isinstance(self.mlp, MlpShape):
            return self
        if not 1 <= top_k <= self.mlp.num_experts:
            raise ConfigurationError(
                f"top-k {top_k} is not possible; give 1 to {self.mlp.num_experts}, the experts of a block"
            )
        return replace(self, mlp=replace(self.mlp, top_k=top_k))


@dataclass(frozen=True)
class DecoderShape:
    """A text decoder with its head."""

    hidden: int  #: width of the residual stream
    kinds: tuple[BlockShape, ...]  #: the different blocks that occur
    order: tuple[int, ...]  #: of each block its place in `kinds`
    head_rows: int  #: logits of a position

    @classmethod
    def of_blocks(cls, hidden: int, blocks: Sequence[BlockShape], head_rows: int) -> "DecoderShape":
        """The decoder with the shapes of all blocks, in their order."""
        places: dict[BlockShape, int] = {}
        order = tuple(places.setdefault(block, len(places)) for block in blocks)
        return cls(hidden, tuple(places), order, head_rows)

    @property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Every block that runs, in its order."""
        return tuple(self.kinds[place] for place in self.order)

    def at(self, setting: Setting) -> "DecoderShape":
        """The blocks that run at a setting; the others cost nothing. A knob without a value is as in the model itself.

        Top-k acts on blocks with experts after the first such block of the whole model, which keeps its own number.

        Raises:
            ConfigurationError: more experts than there are, experts for a dense model, or blocks that are not there.
        """
        top_k, active = experts_of(setting), setting.value(ACTIVE_BLOCKS.name)
        at_top_k = self if top_k is None else self._with_top_k(top_k)
        if active is None:
            return at_top_k
        refuse_impossible_blocks(active.indices, len(self.order))
        return replace(at_top_k, order=tuple(at_top_k.order[index] for index in active.indices))

    def _with_top_k(self, top_k: int) -> "DecoderShape":
        routed = {place for place, kind in enumerate(self.kinds) if isinstance(kind.mlp, ExpertsShape)}
        if not routed:
            raise ConfigurationError(f"top-k {top_k} was requested, but this model has no experts; leave it out")
        at_top_k = tuple(kind.with_top_k(top_k) for kind in self.kinds)
        first = next(block for block, place in enumerate(self.order) if place in routed)
        shifted = (place + len(self.kinds) if block > first else place for block, place in enumerate(self.order))
        return replace(self, kinds=self.kinds + at_top_k, order=tuple(shifted))

    def prefill_flops(self, prompt_tokens: int) -> int:
        """FLOPs of a prefill: all positions through the blocks, the last one through the head."""
        attention = sum(
            2 * count * prompt_tokens * (prompt_tokens * kind.pair_products + kind.key_products)
            for kind, count in self._counted_kinds()
        )
        return prompt_tokens * self._token_flops() + attention + self._head_flops()

    def forward_flops(self, tokens: int) -> int:
        """FLOPs of all positions through the blocks and the head, which is what a model's `forward` computes by
        default.
        """
        return self.prefill_flops(tokens) + (tokens - 1) * self._head_flops()

    def decode_flops(self, first_context: int, steps: int = 1) -> int:
        """FLOPs of `steps` tokens one after the other; the first sees `first_context` keys, its own among them."""
        last = first_context + steps - 1
        attention = sum(
            2 * count * _keys_seen(first_context, last, kind.window) * (kind.pair_products + kind.key_products)
            for kind, count in self._counted_kinds()
        )
        return steps * (self._token_flops() + self._head_flops()) + attention

    def _token_flops(self) -> int:
        """FLOPs of everything in the blocks but attention, for one position."""
        return sum(2 * count * kind.token_products(self.hidden) for kind, count in self._counted_kinds())

    def _head_flops(self) -> int:
        return 2 * self.hidden * self.head_rows

    def _counted_kinds(self) -> list[tuple[BlockShape, int]]:
        return [(self.kinds[place], count) for place, count in Counter(self.order).items()]


def refuse_impossible_blocks(active_blocks: Sequence[int], total: int) -> None:
    """Raises ConfigurationError for what are not ascending indices of some of `total` blocks."""
    ascending = all(earlier < later for earlier, later in itertools.pairwise(active_blocks))
    if not active_blocks or not ascending or active_blocks[0] < 0 or active_blocks[-1] >= total:
        raise ConfigurationError(
            f"active blocks {list(active_blocks)} are not possible; give ascending indices from 0 to {total - 1}"
        )


def _keys_seen(first: int, last: int, window: int | None) -> int:
    """Sum of min(context, window) over the contexts `first` to `last`."""
    growing_until = last if window is None else min(last, window)
    growing = max(growing_until - first + 1, 0)
    full = (last - first + 1) - growing
    return growing * (first + growing_until) // 2 + full * (window or 0)
