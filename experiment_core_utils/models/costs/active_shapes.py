"""The shapes that a model runs with now, read from its config and its modules while knobs are in force.

A config says how a model was trained. How many blocks run, and how many experts their routers choose, is read from the
modules, so operations follow a knob however it was set. Which blocks have experts is read there too: a config may name
them by places that the blocks no longer have. Blocks that were made narrower than their config have no formula.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from experiment_core_utils.models.common.block_modules import BlockModules, ModulePlaces, block_stack
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.costs.counted import counted_flops
from experiment_core_utils.models.costs.decoder import BlockShape, DecoderShape, MlpShape
from experiment_core_utils.primitives.private_apis import PARTS
from experiment_core_utils.records.compute import GenerationFlops
from experiment_core_utils.records.requests import FlopsFigure, RequestSize
from experiment_core_utils.records.text import InferenceResults, QueryRecord


@dataclass(frozen=True)
class _Seen:
    """The blocks that were found in a model, and the model's state at that time."""

    config: dict[str, Any]  #: the entries of the model's config
    #: layers, head: as they were read
    layers: tuple[BlockModules, ...]
    head: BlockModules
    places: ModulePlaces  #: of the modules in them
    top_ks: tuple[int | None, ...]  #: experts that the router of each layer chose
    found: Architecture | UnknownArchitecture

    def is_of(self, model: PreTrainedModel) -> bool:
        """Whether the model is still as it was seen."""
        stack = block_stack(model)
        if stack is None:
            return False
        layers = vars(stack.blocks)[PARTS].values()
        return (
            len(layers) == len(self.layers)
            and all(seen.block() is layer for seen, layer in zip(self.layers, layers, strict=True))
            and self.head.block() is model.get_output_embeddings()
            and self.places.are_as_read()
            and all(seen.top_k == top_k for seen, top_k in zip(self.layers, self.top_ks, strict=True))
            and _entries(model.config) == self.config
        )


_SEEN: "weakref.WeakKeyDictionary[nn.Module, _Seen]" = weakref.WeakKeyDictionary()


def architecture_in_force(model: nn.Module) -> Architecture | UnknownArchitecture:
    """The architecture as it runs now; unknown where modules and config do not describe the same blocks.

    The modules are read once for each model. What was replaced, added or removed since is noticed, and so is a router
    that chooses another number of experts, a config that was changed, or a `forward` put in place of a class's. Not
    seen is what changes a computation and no module: a hook, or a method of another name.
    """
    if not isinstance(model, PreTrainedModel):
        return UnknownArchitecture(
            f"no formula is known for a {type(model).__name__}; it is not a model of transformers"
        )
    seen = _SEEN.get(model)
    if seen is not None and seen.is_of(model):
        return seen.found
    architecture = architecture_of(model.config)
    if isinstance(architecture, UnknownArchitecture):
        return architecture
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        return UnknownArchitecture(f"this {type(model).__name__} has no head, which the formulas of its config count")
    stack = block_stack(model)
    if stack is None:
        return UnknownArchitecture(f"the decoder of this {type(model).__name__} has no list of blocks")
    layers = tuple(BlockModules.of(layer) for layer in stack.blocks)
    head = BlockModules.of(lm_head)
    top_ks = tuple(layer.top_k for layer in layers)
    architecture = architecture_of(model.config, [top_k is not None for top_k in top_ks])
    found = architecture if isinstance(architecture, UnknownArchitecture) else _with_layers(architecture, layers, head)
    places = ModulePlaces.of([*stack.blocks, lm_head])
    _SEEN[model] = _Seen(copy.deepcopy(_entries(model.config)), layers, head, places, top_ks, found)
    return found


def _entries(config: PreTrainedConfig) -> dict[str, Any]:
    """Config entries that determine a model's shape; settings of a quantisation do not compare by their values."""
    return {name: value for name, value in vars(config).items() if name != "quantization_config"}


def _with_layers(
    architecture: Architecture, layers: Sequence[BlockModules], head: BlockModules
) -> Architecture | UnknownArchitecture:
    """The architecture with the number of experts that the routers choose."""
    decoder, name = architecture.decoder, architecture.model_type
    blocks = decoder.blocks
    expected = [block.weights(decoder.hidden) for block in blocks] + [decoder.hidden * decoder.head_rows]
    for place, (part, elements) in enumerate(zip([*layers, head], expected, strict=True)):
        what = f"block {place}" if place < len(layers) else "the head"
        if part.patched is not None:
            return UnknownArchitecture(f"{what} of this {name} has another forward than its class ({part.patched})")
        if part.matrix_elements not in (None, elements):
            return UnknownArchitecture(
                f"{what} of this {name} has {part.matrix_elements} weights in its matrices, its config says {elements}"
            )
    at_top_k = [_with_top_k(block, layer.top_k) for block, layer in zip(blocks, layers, strict=True)]
    return replace(architecture, decoder=DecoderShape.of_blocks(decoder.hidden, at_top_k, decoder.head_rows))


def _with_top_k(block: BlockShape, top_k: int | None) -> BlockShape:
    """The block's shape with the number of experts that its router chooses."""
    is_own = isinstance(block.mlp, MlpShape) or block.mlp.top_k == top_k
    return block if is_own or top_k is None else block.with_top_k(top_k)


# Of a process that counts an architecture without formulas; it needs several seconds to start.
COUNTING_LIMIT_S = 120.0


def generation_flops(model: nn.Module, results: InferenceResults, limit_s: float = COUNTING_LIMIT_S) -> GenerationFlops:
    """FLOPs of the prefill of every prompt and the decode steps of every answer, at the setting in force in the model.

    True tokens only: neither padding nor positions after an answer's end, although both are computed. For architectures
    without formulas the operations are counted in a process of their own, see `counted_flops`.

    Args:
        results: of one process, or pooled over all.
        limit_s: for that process.
    """
    sizes = request_sizes(results["queries"])
    figures = _figures(model, sizes, limit_s) if sizes else [FlopsFigure(None, "formula", "nothing was generated")]
    known = [figure.flops for figure in figures if figure.flops is not None]
    source, tokens = figures[0].source, results["total_output_tokens"]
    if len(known) < len(figures):
        return GenerationFlops(
            prefill_flops=None,
            decode_flops=None,
            generation_flops=None,
            generation_flops_per_output_token=None,
            generation_flops_source=source,
            generation_flops_reason=next(figure.reason for figure in figures if figure.flops is None),
        )
    total = sum(flops.total_flops for flops in known)
    return GenerationFlops(
        prefill_flops=sum(flops.stages.prefill_flops for flops in known),
        decode_flops=sum(flops.decode_flops for flops in known),
        generation_flops=total,
        generation_flops_per_output_token=total / tokens if tokens else None,
        generation_flops_source=source,
        generation_flops_reason=None,
    )


def request_sizes(queries: Sequence[QueryRecord]) -> list[RequestSize]:
    """Each size of prompt and answer once, with the number of prompts that have it."""
    found = Counter((query["input_tokens"], query["output_tokens"]) for query in queries)
    return [RequestSize(prompt, output, requests=times) for (prompt, output), times in found.items()]


def _figures(model: nn.Module, sizes: Sequence[RequestSize], limit_s: float) -> list[FlopsFigure]:
    architecture = architecture_in_force(model)
    if not isinstance(architecture, UnknownArchitecture):
        return [FlopsFigure(architecture.request_flops(size), "formula", None) for size in sizes]
    if not isinstance(model, PreTrainedModel) or isinstance(architecture_of(model.config), Architecture):
        # The config alone would not show what runs.
        return [FlopsFigure(None, "formula", architecture.reason)]
    return counted_flops(model.config, sizes, limit_s)
