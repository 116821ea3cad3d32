"""The Muon optimiser: steps along the nearest orthogonal matrix of the momentum."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from experiment_core_utils.primitives.private_apis import scale_and_add

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """The approximate orthogonal factor U V^T of matrices [M, r, c], in bfloat16 (quintic Newton-Schulz iteration)."""
    a, b, c = _NEWTON_SCHULZ
    states = matrices.bfloat16()
    is_tall = states.shape[-2] > states.shape[-1]
    states = states.mT if is_tall else states
    states = states / (states.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = states @ states.mT
        states = a * states + (b * gram + c * gram @ gram) @ states
    return states.mT if is_tall else states


class Muon:
    """The Muon optimiser (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): orthogonal momentum.

    All matrices of one shape are handled in one batch; a parameter of more than two dimensions counts as a stack of
    matrices. A step changes each matrix by a matrix of spectral norm `lr` * sqrt(max(1, rows / columns)).

    Args:
        parameters: of two or more dimensions.
        momentum: Nesterov momentum.
        weight_decay: decoupled, times `lr`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], momentum: float, weight_decay: float) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self._groups = list(groups.values())
        self._buffers = [torch.zeros_like(_stack(group)) for group in self._groups]

    @torch.no_grad()
    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Take one step with what has a gradient; where `finite` (a scalar) is false it counts as zero."""
        for group, buffer in zip(self._groups, self._buffers, strict=True):
            reached = [pair for pair in zip(group, buffer.chunk(len(group)), strict=True) if pair[0].grad is not None]
            if not reached:
                continue
            tensors: list[torch.Tensor] = [parameter for parameter, _ in reached]
            gradients = torch.where(finite, _stack([each.grad for each in tensors if each.grad is not None]), 0.0)
            for (_, momentum), gradient in zip(reached, gradients.chunk(len(reached)), strict=True):
                momentum.lerp_(gradient, 1 - self.momentum)
            momenta = torch.cat([momentum for _, momentum in reached])
            update = orthogonalise(gradients.lerp(momenta, self.momentum)).float()
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            steps = [part.view_as(p) for part, p in zip(update.chunk(len(reached)), tensors, strict=True)]
            scale_and_add(tensors, 1 - lr * self.weight_decay, steps, -lr * scale)

    def state_dict(self) -> dict[str, Any]:
        """The momentum."""
        return {"buffers": self._buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the momentum of `state`."""
        for buffer, saved in zip(self._buffers, state["buffers"], strict=True):
            buffer.copy_(saved)


def _stack(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape [..., r, c] stacked to [M, r, c]."""
    return torch.cat([tensor.detach().reshape(-1, *tensor.shape[-2:]) for tensor in group])
