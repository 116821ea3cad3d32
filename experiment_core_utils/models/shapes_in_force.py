"""In: a model in memory, its knobs turned or not; out: the shapes that it runs with now, by its config and its modules.

A config says how a model was trained. How many blocks run, and how many experts their routers choose, is read from the
modules, so that operations move with a knob however it was turned.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.architecture_flops import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.decoder_flops import BlockShape, DecoderShape, ExpertsShape, MlpShape


def architecture_in_force(model: nn.Module) -> Architecture | UnknownArchitecture:
    """The architecture as it runs now; unknown where modules and config do not describe the same blocks."""
    if not isinstance(model, PreTrainedModel):
        return UnknownArchitecture(f"no formula is known for a {type(model).__name__}; it is no model of transformers")
    architecture = architecture_of(model.config)
    if isinstance(architecture, UnknownArchitecture):
        return architecture
    blocks, layers = architecture.decoder.blocks, model.get_decoder().layers
    chosen = [_top_k_of(layer) for layer in layers]
    if not _are_alike(blocks, chosen):
        return UnknownArchitecture(
            f"the {len(layers)} blocks of this {model.config.model_type} are not the {len(blocks)} of its config"
        )
    turned = [_turned(block, top_k) for block, top_k in zip(blocks, chosen, strict=True)]
    old = architecture.decoder
    return replace(architecture, decoder=DecoderShape.of_blocks(old.hidden, turned, old.head_rows))


def _turned(block: BlockShape, top_k: int | None) -> BlockShape:
    """With the experts that its router chooses."""
    is_own = isinstance(block.mlp, MlpShape) or block.mlp.top_k == top_k
    return block if is_own or top_k is None else block.with_top_k(top_k)


def _top_k_of(block: nn.Module) -> int | None:
    """Experts that its router chooses for a token; None in a dense block."""
    # A figure of operations must take under a millisecond, also for many blocks: last first, because the router comes
    # after attention, and without `children()`, which looks for modules that are there twice.
    waiting = [block]
    while waiting:
        own = vars(waiting.pop())
        if "top_k" in own:
            return int(own["top_k"])
        waiting.extend(module for module in own["_modules"].values() if module is not None)
    return None


def _are_alike(blocks: Sequence[BlockShape], chosen: Sequence[int | None]) -> bool:
    kinds = [MlpShape if top_k is None else ExpertsShape for top_k in chosen]
    return [type(block.mlp) for block in blocks] == kinds
