"""Whether a model fits the memory of its device, known before any weight is read; and what would make it fit.

The need is the weights in their number format, a margin of `MARGIN` of them (activations, workspaces of libraries, what
an allocator cannot use), and a cache of keys and values. Of quantised weights it is an estimate.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.models.common.quantisation import (
    DEFAULT_4BIT_TYPE,
    bitsandbytes_unsupported_reason,
    fp8_unsupported_reason,
    refuse_wrong_4bit_products,
)
from experiment_core_utils.models.costs.architecture import Architecture, architecture_of
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.primitives.device import free_memory_bytes, most_memory_bytes
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import computes_experts

LOGGER = logging.getLogger(__name__)
MARGIN = 0.1
# Positions of the cache where no request is known yet.
CACHE_TOKENS = 4096
# Bytes of a quantised weight with its scales: bitsandbytes has a float32 for 64 weights of 4 bits and for each row of
# 8 bits, fp8 one for 128 x 128.
_QUANTISED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0, "float8": 1.0, "fp8": 1.0}
# What `ways_out` looks at, the smallest change of the answers first.
WAYS = ("bfloat16", "device_map", "float8", "8bit", "4bit")


@dataclass(frozen=True)
class ModelSizes:
    """What decides how much memory a model takes."""

    elements: int  #: of all parameters, tied ones once
    linear: Sequence[nn.Linear] = ()  #: layers that quantisation changes: all but the head
    expert_elements: int = 0  #: of experts that are no linear layers, which bitsandbytes leaves as they are
    stored_bytes: int | None = None  #: of weights that are quantised in their files already; None for others

    @classmethod
    def of(cls, skeleton: PreTrainedModel, stored_bytes: int | None = None) -> "ModelSizes":
        """The sizes of a model, with or without storage."""
        head = skeleton.get_output_embeddings()
        experts = [module for module in skeleton.modules() if computes_experts(module)]
        inside = {id(each) for module in experts for each in module.modules()}
        linear = [
            each
            for each in skeleton.modules()
            if isinstance(each, nn.Linear) and each is not head and id(each) not in inside
        ]
        in_experts = sum(weight.numel() for module in experts for weight in module.parameters())
        elements = sum(weight.numel() for weight in skeleton.parameters())
        return cls(elements, linear, in_experts, stored_bytes)

    def weights_bytes(self, dtype: torch.dtype, quantisation: str = "none") -> int:
        """Bytes of all weights in memory.

        Args:
            quantisation: `none`, `4bit` or `8bit` by bitsandbytes, or `float8` or `fp8`, which has experts, too.
        """
        if self.stored_bytes is not None:
            return self.stored_bytes
        if quantisation == "none":
            return self.elements * dtype.itemsize
        quantised = sum(layer.weight.numel() for layer in self.linear)
        quantised += self.expert_elements if quantisation in ("float8", "fp8") else 0
        return (self.elements - quantised) * dtype.itemsize + round(quantised * _QUANTISED_BYTES[quantisation])


@dataclass(frozen=True)
class Room:
    """Memory that a model may take."""

    name: str  #: of the devices, such as `cuda:0 + cpu`
    free_bytes: int
    total_bytes: int  #: used or not

    @classmethod
    def of(cls, *devices: torch.device) -> "Room":
        """The memory of these devices together."""
        free, total = (sum(map(count, devices)) for count in (free_memory_bytes, most_memory_bytes))
        return cls(" + ".join(map(str, devices)), free, total)


@dataclass(frozen=True)
class Loading:
    """How a model is to be loaded, where, and for what requests."""

    name: str  #: of the model, for messages
    config: Any  #: of the model
    dtype: torch.dtype
    device: torch.device
    room: Room
    quantisation: str = "none"  #: see `ModelSizes.weights_bytes`
    #: with a device map; None where there is one already, or can be none. Asked only where it matters: to look at the
    #: memory of a GPU takes some of it
    spread_room: Callable[[], Room] | None = None
    shards: int = 1  #: processes that share weights and cache
    rows: int = 1  #: requests at a time
    tokens: int = CACHE_TOKENS  #: positions of each

    @property
    def number_format(self) -> str:
        """The number format of the weights, in words."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantisation == "none" else f"{self.quantisation} and {dtype}"

    def need_bytes(self, sizes: ModelSizes) -> int:
        """Weights, margin and cache of one process; without a cache where no formula is known for the architecture."""
        architecture = architecture_of(self.config)
        blocks = architecture.decoder.blocks if isinstance(architecture, Architecture) else ()
        cache = self.rows * cache_elements(blocks, self.tokens) * self.dtype.itemsize
        return round(self.weights_bytes(sizes) * (1 + MARGIN)) + cache // self.shards

    def weights_bytes(self, sizes: ModelSizes) -> int:
        """Bytes of the weights of one process."""
        return sizes.weights_bytes(self.dtype, self.quantisation) // self.shards


def memory_lines(sizes: ModelSizes, loading: Loading, flags: Mapping[str, str]) -> list[str]:
    """The line that says that a model may not fit, and what would help; none where it fits.

    Args:
        flags: what to give for each of `WAYS` that the job has, such as `--precision bfloat16`.

    Raises:
        ConfigurationError: the weights alone, not quantised, are larger than the whole memory, used or not.
    """
    need, room = loading.need_bytes(sizes), loading.room
    if need <= room.free_bytes:
        return []
    advice = " / ".join(ways_out(sizes, loading, flags)) or "a smaller model"
    line = (
        f"{loading.name} needs {need / 1e9:.3g} GB in {loading.number_format}, {room.name} has "
        f"{room.free_bytes / 1e9:.3g} GB free; use {advice}"
    )
    # What quantised weights need is an estimate.
    is_known = sizes.stored_bytes is None and loading.quantisation == "none"
    if is_known and loading.weights_bytes(sizes) > room.total_bytes:
        raise ConfigurationError(line)
    return [line]


def check_memory(sizes: ModelSizes, loading: Loading, flags: Mapping[str, str]) -> None:
    """Warn in one line where a model may not fit; raises ConfigurationError where it cannot, see `memory_lines`."""
    for line in memory_lines(sizes, loading, flags):
        if os.environ.get("RANK", "0") == "0":
            LOGGER.warning("%s", line)


def ways_out(sizes: ModelSizes, loading: Loading, flags: Mapping[str, str]) -> Iterable[str]:
    """What would make the model fit and is possible on this device, by its flag."""
    for way in WAYS:
        if way not in flags or not _is_possible(way, sizes, loading):
            continue
        if way == "device_map" and loading.spread_room is not None:
            other = replace(loading, room=loading.spread_room())
        elif way == "bfloat16":
            other = replace(loading, dtype=torch.bfloat16)
        else:
            other = replace(loading, quantisation=way)
        if other.need_bytes(sizes) <= other.room.free_bytes:
            yield flags[way]


def _is_possible(way: str, sizes: ModelSizes, loading: Loading) -> bool:
    if way == "device_map":
        return loading.spread_room is not None
    if sizes.stored_bytes is not None or loading.quantisation != "none" or (loading.shards > 1 and way != "bfloat16"):
        return False
    if way == "bfloat16":
        return loading.dtype.itemsize > torch.bfloat16.itemsize
    if way == "float8":
        return fp8_unsupported_reason(loading.device) is None
    if bitsandbytes_unsupported_reason(loading.device) is not None:
        return False
    return way == "8bit" or _multiplies_4bit(sizes, loading)


def _multiplies_4bit(sizes: ModelSizes, loading: Loading) -> bool:
    try:
        refuse_wrong_4bit_products(sizes.linear, loading.device, DEFAULT_4BIT_TYPE)
    except ConfigurationError:
        return False
    return True
