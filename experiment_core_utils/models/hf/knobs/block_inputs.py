"""The inputs of decoder blocks beside hidden states, compared to prove that layer skipping does not change them.

Masks, positions and the layer of the cache belong to the kind of a block (a sliding window, full attention, a
recurrence). A decoder chooses them by a block's place; with blocks skipped it must choose what the full model does.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.hf.knobs.patches import hooks_removed

# Marks in the names of arguments that say who attends to whom, and where a token is.
_ABOUT_PLACES = ("mask", "position", "rope", "rotary", "freq", "cos", "sin")
# In each run a block computes a position anew, so that the last bits may differ on another number of threads.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of one block, over all its runs."""

    #: for each run the tensors by name; `None` is a mask that is not needed
    runs: Sequence[Mapping[str, torch.Tensor | None]]
    layer: tuple[str, int | None] | None  #: kind and window of its layer of the cache; None where it has none


@contextmanager
def inputs_seen(blocks: Sequence[nn.Module]) -> Iterator[dict[int, list[dict[str, torch.Tensor | None]]]]:
    """A context that notes, by index, the inputs of each block that runs; never while timing."""
    seen: dict[int, list[dict[str, torch.Tensor | None]]] = {}

    def noting(index: int) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            named = {**dict(zip(inspect.signature(block.forward).parameters, args, strict=False)), **kwargs}
            places = {name: value for name, value in named.items() if any(mark in name for mark in _ABOUT_PLACES)}
            seen.setdefault(index, []).append(dict(_tensors(places)))

        return hook

    handles = [block.register_forward_pre_hook(noting(index), with_kwargs=True) for index, block in enumerate(blocks)]
    with hooks_removed(handles):
        yield seen


def _tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    for name, value in named.items():
        if value is None or isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple | list):
            yield from _tensors({f"{name}[{place}]": part for place, part in enumerate(value)})


def layer_kind(layer: Any) -> tuple[str, int | None] | None:
    """The class of a cache's layer and its window; None without one."""
    if layer is None:
        return None
    window = getattr(layer, "sliding_window", None)
    return type(layer).__name__, window if isinstance(window, int) else None


def other_inputs(found: BlockInputs, expected: BlockInputs) -> str | None:
    """The name of the first thing that differs; None where nothing does."""
    if found.layer != expected.layer:
        return f"layer of the cache ({_named(found.layer)}, not {_named(expected.layer)})"
    for mine, theirs in zip(found.runs, expected.runs, strict=True):
        for name in mine.keys() | theirs.keys():
            if not _alike(mine.get(name), theirs.get(name)):
                return name
    return None


def _named(layer: tuple[str, int | None] | None) -> str:
    if layer is None:
        return "none"
    kind, window = layer
    return kind if window is None else f"{kind} of {window}"


def _alike(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.is_floating_point():
        return torch.equal(mine, theirs)
    return torch.allclose(mine, theirs, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
