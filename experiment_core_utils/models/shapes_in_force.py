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
    routers = [router_of(layer) for layer in layers]
    if not _are_alike(blocks, routers):
        return UnknownArchitecture(
            f"the {len(layers)} blocks of this {model.config.model_type} are not the {len(blocks)} of its config"
        )
    turned = [
        block if router is None else block.with_top_k(int(router.top_k))
        for block, router in zip(blocks, routers, strict=True)
    ]
    old = architecture.decoder
    return replace(architecture, decoder=DecoderShape.of_blocks(old.hidden, turned, old.head_rows))


def router_of(block: nn.Module) -> nn.Module | None:
    """What chooses the experts of a block; None in a dense one."""
    return next((module for module in block.modules() if "top_k" in vars(module)), None)


def _are_alike(blocks: Sequence[BlockShape], routers: Sequence[nn.Module | None]) -> bool:
    kinds = [MlpShape if router is None else ExpertsShape for router in routers]
    return [type(block.mlp) for block in blocks] == kinds
