"""A mixture of experts, written token by token and expert by expert."""

from typing import Any

import numpy as np
import torch
from torch import nn


class Mixture(nn.Module):
    """The mixture of a block, one token and one expert after the other."""

    def __init__(self, mlp: Any, top_k: int, mass: float, is_scaled: bool) -> None:
        super().__init__()
        self.rest = mlp
        self.rule = (top_k, mass, is_scaled)
        self.used: list[int] = []

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        router, first, second = (
            weight.detach().double().numpy()
            for weight in (self.rest.gate.weight, self.rest.experts.gate_up_proj, self.rest.experts.down_proj)
        )
        rows = states.reshape(-1, states.shape[-1])
        mixed = np.stack([self._of_token(row, router, first, second) for row in rows.detach().double().numpy()])
        result = torch.from_numpy(mixed).float()
        if hasattr(self.rest, "shared_expert"):
            result += self.rest.shared_expert_gate(rows).sigmoid() * self.rest.shared_expert(rows)
        return result.view_as(states)

    def _of_token(self, row: np.ndarray, router: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        top_k, mass, is_scaled = self.rule
        scores = np.exp(router @ row - (router @ row).max())
        probabilities = scores / scores.sum()
        chosen: list[int] = []
        while len(chosen) < top_k and (not chosen or sum(probabilities[expert] for expert in chosen) < mass):
            chosen.append(max(set(range(len(probabilities))) - set(chosen), key=lambda expert: probabilities[expert]))
        self.used.append(len(chosen))
        whole = sum(probabilities[expert] for expert in chosen) if is_scaled else 1.0
        mixed = np.zeros_like(row)
        for expert in chosen:
            gate, up = np.split(first[expert] @ row, 2)
            mixed += probabilities[expert] / whole * (second[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return mixed
