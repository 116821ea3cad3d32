"""A model over several devices, as accelerate dispatches it: which they are, and where a request enters."""

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination, OutOfMemory
from experiment_core_utils.primitives.private_apis import arguments_left_in_place, undivided_classes
from experiment_core_utils.records.caveats import Caveat, caveat

#: where accelerate leaves parts that no device has room for
OFFLOADED = ("cpu", "disk")


def refuse_device_map(requested: object, device: torch.device, flag: str) -> None:
    """Raises for a model that is to be spread and cannot be; None is one device.

    Args:
        device: of this process.
        flag: as it was given, such as `--device_map auto`.

    Raises:
        ConfigurationError: this process has no GPU.
        ImpossibleCombination: several processes were launched.
    """
    if requested is None:
        return
    if device.type != "cuda":
        raise ConfigurationError(f"{flag} shards a model over GPUs, and this process has none; drop it")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise ImpossibleCombination(f"{flag} gives all GPUs to one process, and {launched} were launched; launch one")


def spread_over(model: PreTrainedModel, requested: str | Mapping[str, Any]) -> PreTrainedModel:
    """A model that was made on the host, dispatched as `from_pretrained` does it.

    Args:
        requested: `auto`, or the place of each part.
    """
    whole = undivided_classes(model)
    if isinstance(requested, str):
        memory = get_balanced_memory(model, no_split_module_classes=whole)
        places = dict(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole))
    else:
        places = dict(requested)
    if "disk" in places.values():
        raise OutOfMemory("the model does not fit on the GPUs and the host together")
    found: PreTrainedModel = dispatch_model(model, places, skip_keys=arguments_left_in_place(model))
    return found


def places_of(model: nn.Module) -> Mapping[str, Any]:
    """The place of each part, as accelerate names it; {} for a model that it did not dispatch."""
    found: Mapping[str, Any] = vars(model).get("hf_device_map", {})
    return found if len(set(map(str, found.values()))) > 1 else {}


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights come to their device only when they are used."""
    return any(weight.is_meta for weight in model.parameters())


def placement_caveats(device_map: Mapping[str, str] | None) -> list[Caveat]:
    """The caveat of a model some of whose weights come to their device only when they are used; none otherwise.

    Args:
        device_map: as the model describes it.
    """
    places = list((device_map or {}).values())
    off = [place for place in places if place in OFFLOADED]
    # A model without a GPU computes where its weights are.
    if not off or set(places) == {"cpu"}:
        return []
    return [caveat("offloaded_weights", num_parts=len(off), num_all=len(places))]


def refuse_offload(model: nn.Module, places: Collection[str], where: str) -> None:
    """Raises OutOfMemory where accelerate put parts in one of the places.

    Args:
        where: the model does not fit, such as "on the GPUs".
    """
    off = [name for name, place in places_of(model).items() if place in places]
    if off:
        raise OutOfMemory(f"the model does not fit {where}: {len(off)} of its parts were left, for example {off[0]}")


def spread_reason(model: nn.Module) -> str | None:
    """Why neither graphs nor engines run a model: its weights are on several devices; None where they are on one."""
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return "several processes share its weights"
    places = places_of(model)
    devices = sorted({place if place in OFFLOADED else str(_device_at(place)) for place in places.values()})
    return f"its weights are on several devices ({', '.join(devices)})" if devices else None


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes, wherever its weights are in the meantime."""
    hook = vars(module).get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        place = getattr(each, "execution_device", None)
        if place is not None:
            return _device_at(place)
    return next(module.parameters()).device


def computing_devices(model: PreTrainedModel) -> tuple[torch.device, ...]:
    """The devices on which a model computes, the one that requests are sent to first."""
    places = places_of(model)
    if not places:
        return (model.device,)
    first = device_of(model.get_input_embeddings())
    others = [_device_at(place) for place in places.values() if place not in OFFLOADED]
    return tuple(dict.fromkeys([first, *others]))


def _device_at(place: Any) -> torch.device:
    """accelerate numbers GPUs."""
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
