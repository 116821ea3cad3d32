"""Memory by formula: weights, KV cache, the largest activations of a prefill, and what a decode step reads of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from experiment_core_utils.models.common.describe import stored_bytes
from experiment_core_utils.models.costs.decoder import BlockShape, ExpertsShape


def cache_elements(blocks: Sequence[BlockShape], tokens: int) -> int:
    """Elements of keys and values that a growing cache of one row of `tokens` positions has.

    Of a sliding window it keeps one position less than a step sees, because that is the step's own.
    """
    return sum(block.cache_width * _at_most(tokens, block.window, 1) for block in blocks)


def activation_elements(hidden: int, blocks: Sequence[BlockShape], tokens: int) -> int:
    """Elements that a prefill of one row has at a time beside weights and cache, in its widest block.

    For each token: the residual with a block's normed input and its output, and the wider of attention (queries, keys,
    values, result) and feed-forward part (gate and up, their product; of experts also each row's input and output).
    Not counted: scores of attention, which fused kernels do not store; the vision stage; logits; workspaces of
    libraries; what the allocator keeps beside.

    Args:
        hidden: width of the residual stream.
        blocks: those that run.
    """
    return tokens * (3 * hidden + max(max(_attention_width(each), _mlp_width(each, hidden)) for each in blocks))


def _attention_width(block: BlockShape) -> int:
    if block.latent is None:
        return 2 * block.query_width + 2 * block.kv_width
    return block.query_width + block.latent.expanded_width + block.latent.rotary_width + block.latent.value_width


def _mlp_width(block: BlockShape, hidden: int) -> int:
    mlp = block.mlp
    if isinstance(mlp, ExpertsShape):
        return mlp.top_k * (2 * hidden + 3 * mlp.width) + 3 * mlp.shared_width
    return (3 if mlp.is_gated else 2) * mlp.width


def read_elements(blocks: Sequence[BlockShape], contexts: Iterable[int]) -> int:
    """Elements of keys and values that decode steps of one row read, its own among them; `contexts` are the keys of
    each step.
    """
    return sum(block.cache_width * _at_most(context, block.window, 0) for context in contexts for block in blocks)


def _at_most(tokens: int, window: int | None, own: int) -> int:
    return tokens if window is None else min(tokens, window - own)


@dataclass(frozen=True)
class ModelBytes:
    """A staged model's memory at a setting."""

    weights_bytes: int  #: parameters and buffers as stored, those of blocks that do not run among them
    step_weights_bytes: float  #: that a decode step of the requests that run together reads
    blocks: tuple[BlockShape, ...]  #: those that run, of which the cache has keys and values
    element_bytes: int  #: of a number in the cache
    hidden: int | None = None  #: width of the residual stream; None where activations are not counted

    def activation_bytes(self, tokens: int) -> int | None:
        """Bytes of the largest activations of a prefill of `tokens` positions; see `activation_elements`."""
        if self.hidden is None:
            return None
        return activation_elements(self.hidden, self.blocks, tokens) * self.element_bytes

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the cache of one request of `tokens` positions; see `cache_elements`."""
        return cache_elements(self.blocks, tokens) * self.element_bytes

    def step_bytes(self, prompt_tokens: int, steps: int, requests: int = 1) -> float:
        """Bytes that the decode steps of so many alike requests read together: each the weights, and the keys and
        values that its requests see.
        """
        # Step i (from 1) attends to the prompt and i generated tokens.
        contexts = range(prompt_tokens + 1, prompt_tokens + steps + 1)
        seen = requests * read_elements(self.blocks, contexts)
        return steps * self.step_weights_bytes + seen * self.element_bytes


@dataclass(frozen=True)
class RoutedBytes:
    """Bytes of the experts of a block, of which a step reads those that its tokens choose."""

    stored: int
    num_experts: int
    top_k: int

    def read(self, rows: int) -> float:
        """Bytes read by `rows` tokens that choose evenly and independently: 1 - (1 - k/E)^rows of the experts; for one
        row exactly k.
        """
        return self.stored * (1 - (1 - self.top_k / self.num_experts) ** rows)


@dataclass(frozen=True)
class StepWeights:
    """Bytes of the weights that a decode step reads: active blocks and head, neither embedding nor vision."""

    always: int  #: bytes that every step reads
    routed: tuple[RoutedBytes, ...]  #: experts of each block that has some

    def read(self, rows: int) -> float:
        """Bytes that a step of `rows` rows reads; see `RoutedBytes.read`."""
        return self.always + sum(each.read(rows) for each in self.routed)


def step_weights(
    blocks: Sequence[nn.Module], head: nn.Module, experts: Sequence[tuple[int, int] | None]
) -> StepWeights:
    """The weights that a decode step reads, as they are stored, packed weights packed.

    Args:
        blocks: that run.
        experts: of each block its experts and how many of them run for a token; None for a dense one.
    """
    routed = tuple(
        RoutedBytes(_experts_bytes(block), *chosen)
        for block, chosen in zip(blocks, experts, strict=True)
        if chosen is not None
    )
    whole = sum(stored_bytes(block) for block in blocks) + stored_bytes(head)
    return StepWeights(whole - sum(each.stored for each in routed), routed)


def _experts_bytes(block: nn.Module) -> int:
    """Bytes of the routed experts of a block; shared experts have another name in every family."""
    return sum(stored_bytes(module) for name, module in block.named_modules() if name.rpartition(".")[2] == "experts")
