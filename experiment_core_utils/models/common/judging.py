"""A model's modules compute in higher precision, so that they can judge engines, whose proof is in `engine_proof`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from experiment_core_utils.engines.engine_proof import higher_precision
from experiment_core_utils.models.common.placement import is_offloaded
from experiment_core_utils.models.common.quantisation import dequantisation_of
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, EngineRefused, first_line
from experiment_core_utils.primitives.private_apis import (
    attention_implementation,
    experts_implementation,
    set_implementations,
)


class InPrecision(TorchFunctionMode):
    """A mode in which torch computes in `dtype`, whatever lower precision weights and inputs have.

    Each operand is converted when it is used, so that at most one weight exists twice. What code asks of a tensor's
    dtype, and conversions to lower precision that it makes, are answered with `dtype` too. Operations in place keep
    the precision of the tensor that they change.
    """

    # They move or name values without computing, so that converting their operand could wait, and may be large.
    _MOVES = frozenset(
        "view reshape transpose t permute unsqueeze squeeze expand expand_as chunk split unbind narrow select "
        "contiguous flatten unflatten detach size dim numel stride is_contiguous __getitem__ is_floating_point "
        "element_size data_ptr storage_offset untyped_storage get_device is_complex nelement ndimension __len__ "
        "_is_view requires_grad_ index_select".split()
    )
    _CONVERTS = frozenset(("to", "type", "float", "half", "bfloat16", "double"))

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._bits = torch.finfo(dtype).bits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            value = func(*args, **kwargs)
            return self.dtype if isinstance(value, torch.dtype) and self._is_lower(value) else value
        if name in self._MOVES:
            return func(*args, **kwargs)
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            raised = self._raised_dtype
        else:
            raised = self._raised
        # An embedding's table may be large: what was looked up is converted in place of it.
        if name in self._CONVERTS or name == "embedding":
            args = tuple(map(self._raised_dtype, args))
            return self._raised(func(*args, **{key: self._raised_dtype(value) for key, value in kwargs.items()}))
        return func(*map(raised, args), **{key: raised(value) for key, value in kwargs.items()})

    def _is_lower(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and torch.finfo(dtype).bits < self._bits

    def _raised_dtype(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and self._is_lower(value) else value

    def _raised(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.dtype) if self._is_lower(value.dtype) else value
        if type(value) in (tuple, list):
            return type(value)(map(self._raised, value))
        return self._raised_dtype(value)


@contextmanager
def modules_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """A context in which a transformers model's modules compute in `dtype`: attention and experts by code that takes
    it, quantised layers on their de-quantised weights. All is restored afterwards.
    """
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = [(config, attention_implementation(config), experts_implementation(config)) for config in configs.values()]
    quantised = [(layer, weight) for layer in model.modules() if (weight := dequantisation_of(layer)) is not None]
    try:
        for config, attention, experts in before:
            attention = attention if attention in (None, "eager") else "sdpa"
            set_implementations(config, attention, None if experts is None else "eager")
        for layer, weight in quantised:
            vars(layer)["forward"] = partial(_product, layer, weight)
        with InPrecision(dtype):
            yield
    finally:
        for layer, _ in quantised:
            vars(layer).pop("forward", None)
        for restored in before:
            set_implementations(*restored)


@contextmanager
def judging(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """`modules_in` the precision above `dtype`; raises EngineRefused where the modules cannot compute in it."""
    if is_offloaded(model):
        raise EngineRefused(
            "whether it is right cannot be judged: weights that come to their device for each use stay as they are"
        )
    try:
        with modules_in(model, higher_precision(dtype)):
            yield
    except torch.OutOfMemoryError:
        raise
    except LIBRARY_ERRORS as error:
        precision = str(higher_precision(dtype)).removeprefix("torch.")
        raise EngineRefused(
            f"whether it is right cannot be judged, since the modules do not run in {precision} ({first_line(error)})"
        ) from error


def _product(layer: Any, weight: Callable[[], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(states, weight(), layer.bias)
