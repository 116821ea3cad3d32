"""Models that accelerate dispatched to the processor, with parts that are read from the disk when they are used."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from accelerate import dispatch_model
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.primitives.private_apis import arguments_left_in_place


def dispatched(model: PreTrainedModel, folder: Path, from_disk: Collection[str]) -> Any:
    """The model with hooks on every part.

    Args:
        folder: where the parts are kept.
        from_disk: names of parts, such as `model.layers.1`, that have no storage but while they are used.
    """
    places = {name: "disk" if name in from_disk else "cpu" for name in _parts(model, "")}
    assert set(from_disk) <= places.keys()
    keys = arguments_left_in_place(model)
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, skip_keys=keys)


def _parts(module: nn.Module, before: str) -> Iterator[str]:
    for name, part in module.named_children():
        if isinstance(part, nn.ModuleList):
            yield from (f"{before}{name}.{place}" for place in range(len(part)))
        elif any(isinstance(inside, nn.ModuleList) for inside in part.modules()):
            yield from _parts(part, f"{before}{name}.")
        else:
            yield f"{before}{name}"
