"""Experts of vendors' code whose loops ask the host which of them were chosen, in a form that a graph can contain."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.primitives.errors import ConfigurationError

T = TypeVar("T")
# Rows for which the weights of each row's expert are copied; above it they would take more memory than the experts.
MOST_ROWS = 64
ALL_EXPERTS = "its experts' loops ask the host, so that graphs compute all experts, or copy those of each row"


class LoopedExperts(GraphCapturer):
    """Captures work as it is where that can be, and else with other forms of its experts.

    Experts that are given which tokens chose them are all computed, with weight 0 where they were not chosen; those
    that are given sorted rows and how many each has are computed row by row.

    Args:
        model: whose experts the work may run.
        inner: makes the replays.
    """

    def __init__(self, model: nn.Module, inner: GraphCapturer) -> None:
        self._inner = inner
        #: why graphs do more than the modules; None as long as no graph does.
        self.reason: str | None = None
        self._forms = [(module, form) for module in model.modules() if (form := _form_of(module)) is not None]

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        try:
            return self._inner.capture(work, constants)
        except ConfigurationError:
            if not self._forms:
                raise
        with ExitStack() as stack:
            for module, form in self._forms:
                stack.enter_context(replaced_method(module, "forward", form))
            replay = self._inner.capture(work, constants)
        self.reason = ALL_EXPERTS
        return replay


def _form_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    if hasattr(type(module).forward, "__wrapped__"):
        # Transformers chooses how these are computed, and can do so without the host.
        return None
    takes = tuple(inspect.signature(module.forward).parameters)
    number = getattr(module, "total_experts", getattr(module, "num_experts", None))
    if takes == ("hidden_states", "top_k_index", "top_k_weights") and isinstance(number, int):
        return partial(_every_expert, module.forward, number)
    weight: Any = getattr(module, "weight", None)
    if takes == ("input", "tokens_per_expert") and isinstance(weight, torch.Tensor) and weight.dim() == 3:
        return partial(_row_by_row, module.forward, weight)
    return None


def _every_expert(
    plain: Callable[..., torch.Tensor], number: int, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What the experts give for tokens that chose experts [T, k] with weights [T, k]."""
    total = torch.zeros_like(hidden_states)
    for expert in range(number):
        weights = torch.where(top_k_index == expert, top_k_weights, 0).sum(dim=-1, keepdim=True)
        # Which expert it is must be a constant of the work; with a single column some lose an axis.
        expert_ids = torch.full((len(weights), 2), expert, dtype=top_k_index.dtype, device=top_k_index.device)
        weights = torch.cat([weights, torch.zeros_like(weights)], dim=-1)
        total = total + plain(hidden_states, expert_ids, weights).view_as(total)
    return total


def _row_by_row(
    plain: Callable[..., torch.Tensor], weight: torch.Tensor, input: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    """Rows [N, in], in the order of their experts, times weights [E, in, out] of these."""
    if len(input) > MOST_ROWS:
        return plain(input, tokens_per_expert)
    rows = torch.arange(len(input), device=input.device)
    experts = torch.searchsorted(tokens_per_expert.cumsum(0), rows, right=True)
    return torch.bmm(input[:, None], weight.index_select(0, experts))[:, 0]
