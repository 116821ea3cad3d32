"""The implementation of experts that transformers uses for decode steps: its switch, and what really ran.

On a GPU `generate()` decodes with `batched_mm` where `grouped_mm` is in force. The switch walks over all modules, so
that it belongs around a loop of steps; a step outside of any such loop makes it for itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.primitives.private_apis import (
    computes_experts,
    decode_kernels_switch,
    experts_implementation,
    owns_experts,
)


class DecodeKernels:
    """The switch of one model's experts to the kernels of decode steps."""

    def __init__(self, model: PreTrainedModel) -> None:
        # Not in all versions, and not in models that do not generate.
        self._switched = decode_kernels_switch(model)
        self._are_switched = False

    @property
    def needs_switch(self) -> bool:
        """Whether the next step has to make the switch itself; never with gradients, which `generate()` does not
        compute.

        `batched_mm` gathers weights for each token, and gradients would keep them all.
        """
        return not self._are_switched and self._switched is not None and not torch.is_grad_enabled()

    @contextmanager
    def switched(self) -> Iterator[None]:
        """A context with the switch that `generate()` makes around its decode steps; may be entered again inside."""
        if not self.needs_switch:
            yield
            return
        with self._switched():
            self._are_switched = True
            try:
                yield
            finally:
                self._are_switched = False


def experts_in_force(model: nn.Module) -> str | None:
    """The experts implementation of the config; None for a model without experts, or that is not transformers'."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return next((experts_implementation(part.config) for part in parts if owns_experts(part)), None)


class ExecutedExperts:
    """The implementations by which experts are computed while it is entered, as each of their modules finds it."""

    def __init__(self, model: nn.Module) -> None:
        # What transformers' decorator of experts gives to each class of them.
        self._experts = [module for module in model.modules() if computes_experts(module)]
        self._seen: dict[str, None] = {}
        self._handles: list[Any] = []

    @property
    def names(self) -> str | None:
        """The implementations that ran, usually one; None where no experts ran."""
        return ", ".join(self._seen) or None

    def __enter__(self) -> "ExecutedExperts":
        self._handles = [module.register_forward_pre_hook(self._note) for module in self._experts]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, module: Any, _inputs: Any) -> None:
        self._seen[str(experts_implementation(module.config))] = None
