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
        if hasattr(self.rest, "shared_experts"):
            result += self.rest.shared_experts(rows)
        return result.view_as(states)

    def _of_token(self, row: np.ndarray, router: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        weights = self._weights(router @ row)
        self.used.append(len(weights))
        mixed = np.zeros_like(row)
        for expert, weight in weights.items():
            gate, up = np.split(first[expert] @ row, 2)
            mixed += weight * (second[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return mixed

    def _weights(self, logits: np.ndarray) -> dict[int, float]:
        """The weights of a token's experts."""
        top_k, mass, is_scaled = self.rule
        scores = np.exp(logits - logits.max())
        probabilities = scores / scores.sum()
        chosen: list[int] = []
        while len(chosen) < top_k and (not chosen or sum(probabilities[expert] for expert in chosen) < mass):
            chosen.append(max(set(range(len(probabilities))) - set(chosen), key=lambda expert: probabilities[expert]))
        whole = sum(probabilities[expert] for expert in chosen) if is_scaled else 1.0
        return {expert: probabilities[expert] / whole for expert in chosen}


class GroupedMixture(Mixture):
    """A mixture with a sigmoid for each expert, of the best groups alone, as DeepSeek-V3's."""

    def _weights(self, logits: np.ndarray) -> dict[int, float]:
        top_k, mass, _ = self.rule
        router = self.rest.gate
        scores = 1 / (1 + np.exp(-logits))
        biased = scores + router.e_score_correction_bias.double().numpy()
        groups = np.split(np.arange(len(scores)), router.num_group)
        groups.sort(key=lambda group: -np.sort(biased[group])[-2:].sum())
        allowed = [expert for group in groups[: router.topk_group] for expert in group]
        chosen = sorted(sorted(allowed, key=lambda expert: -biased[expert])[:top_k], key=lambda expert: -scores[expert])
        fewest = 1
        while fewest < top_k and scores[chosen[:fewest]].sum() < mass * scores[chosen].sum():
            fewest += 1
        whole = scores[chosen[:fewest]].sum()
        return {expert: router.routed_scaling_factor * scores[expert] / whole for expert in chosen[:fewest]}
