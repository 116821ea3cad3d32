"""The products and bytes of each stage of a request, and the least time that they take; nothing else is counted."""

from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.costs.architecture import shapes_of
from experiment_core_utils.models.costs.decoder import DecoderShape, ExpertsShape
from experiment_core_utils.models.costs.vision_table import molmoe_vision


@dataclass(frozen=True)
class Rates:
    """The rates that a device attains; infinite bytes where only products count."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """The products and bytes of a stage; for decode, of one step."""

    flops: float
    bytes: float

    def floor_s(self, rates: Rates) -> float:
        """The floor in seconds: the slower of products and bytes."""
        return max(self.flops / rates.flops_per_s, self.bytes / rates.bytes_per_s)


@dataclass(frozen=True)
class Shape:
    """The sizes of a request at a setting; `experts` per token of each active block, any number for a dense one."""

    crops: int
    prompt_tokens: int
    experts: tuple[int, ...]


def work_of(config: Any, shape: Shape, element_bytes: int) -> dict[str, Work]:
    """The work of each stage that the request has, to a model of this config; pictures are a MolmoE's.

    Attention counts half of the rectangle in the prefill, as a causal kernel computes it. Weights are read once, of the
    experts those that tokens choosing evenly hit. A decode step is the first one after the prompt.
    """
    tokens, whole = shape.prompt_tokens, shapes_of(config)[0]
    running = [block.with_top_k(top_k) for block, top_k in zip(whole.blocks, shape.experts, strict=False)]
    decoder = DecoderShape.of_blocks(whole.hidden, running, whole.head_rows)
    half_of_attention = tokens * tokens * sum(block.pair_products for block in running)
    cache = sum(block.cache_width for block in running) * element_bytes
    read = {positions: _weights(decoder, positions) * element_bytes for positions in (1, tokens)}
    found = {
        "prefill": Work(decoder.prefill_flops(tokens) - half_of_attention, read[tokens] + tokens * cache),
        "decode": Work(decoder.decode_flops(tokens + 1), read[1] + (tokens + 1) * cache),
    }
    if not shape.crops:
        return found
    vision_flops = shape.crops * molmoe_vision(config).flops_per_crop
    return {"vision": Work(vision_flops, _vision_weights(config) * element_bytes), **found}


def _weights(decoder: DecoderShape, tokens: int) -> float:
    """Number of weights of the blocks and the head, without the experts that so many tokens do not hit."""
    found = float(decoder.hidden * decoder.head_rows)
    for block in decoder.blocks:
        found += block.weights(decoder.hidden)
        if isinstance(block.mlp, ExpertsShape):
            missed = block.mlp.num_experts * (1 - block.mlp.top_k / block.mlp.num_experts) ** tokens
            found -= missed * 3 * decoder.hidden * block.mlp.width
    return found


def _vision_weights(config: Any) -> int:
    vision = config.vision_config
    blocks = max(vision.num_hidden_layers + index for index in config.vision_feature_layers) + 1
    return int(blocks * (4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size))
