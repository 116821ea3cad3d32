"""The logits of trained networks for one request, by a few products of arrays on the host.

At batch 1 networks of some ten thousand parameters cost a GPU their launches and nothing else, and as modules they cost
the host more than their arithmetic does. What is called once a request is seldom in the host's caches, so that the
number of different operations counts for more than their sizes: what a budget adds is computed once for each budget,
and small sums are made in Python.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from experiments.controller.networks.two_stage import FREQUENCIES, LONGEST_PERIOD, SHORTEST_PERIOD, TwoStageNetworks

Array = np.ndarray
# Logits of a stage's two actions.
Logits = tuple[list[float], list[float]]
# As of `layer_norm`, and of the budget token.
NORM_EPS, RMS_EPS = 1e-5, 1e-8
# OpenBLAS wakes its threads for a product of 9216 weights or more, which takes longer than the product.
MOST_WEIGHTS = 8192


@dataclass(frozen=True)
class HostBudget:
    """The values that depend on a budget alone."""

    known: Array  #: its part in front of stage 1's inner layer [w], biases in it
    token: Array  #: embedding of the budget token [H]


class HostNetworks:
    """`TwoStageNetworks` as they were when this was made, in float32; the numbers differ by rounding alone."""

    def __init__(self, networks: TwoStageNetworks) -> None:
        state = networks.state_dict().items()
        weights = {name: np.array(each.detach().to("cpu", torch.float32).numpy(), order="C") for name, each in state}
        space, width = networks.space, networks.hidden_size
        self._tiers, self._top_ks = len(space.knobs.tiers), len(space.knobs.top_ks)
        self._possible = space.possible
        self._weights = weights
        steps = np.linspace(0.0, 1.0, FREQUENCIES)
        self._turns = 2 * math.pi / (LONGEST_PERIOD * (SHORTEST_PERIOD / LONGEST_PERIOD) ** steps)
        self._mean = np.full(width, 1 / width, dtype=np.float32)
        self._prompt_in = _pieces(weights["prompt_in.weight"])
        self._states_in = [_pieces(half) for half in np.split(weights["states_in.weight"], 2, axis=1)]
        tier, pause = np.split(weights["chosen_in.weight"], [self._tiers])
        # [tiers, pauses, w], what stage 1's choice adds in front of stage 2's inner layer, biases in it.
        self._chosen = tier[:, None] + pause[None] + weights["states_in.bias"]
        self._biases = {name: weights[f"{name}.bias"].tolist() for name in ("first_out", "second_out")}

    def budget(self, budget_s: float) -> HostBudget:
        """The values of a budget in seconds that both stages need."""
        weights, angles = self._weights, math.log(budget_s * 1e3) * self._turns
        features = np.concatenate([np.sin(angles), np.cos(angles)]).astype(np.float32)
        code = _gelu(weights["budget.encode.weight"] @ features + weights["budget.encode.bias"])
        raw = weights["budget.embed.weight"] @ code + weights["budget.embed.bias"]
        token = raw * (weights["budget.embedding_rms"] / math.sqrt(float(raw @ raw) / len(raw) + RMS_EPS))
        return HostBudget(weights["code_in.weight"] @ code + weights["prompt_in.bias"], token.astype(np.float32))

    def first(self, prompt: Array, budget: HostBudget) -> Logits:
        """Stage 1: logits of tiers and of pauses, from the prompt [H] and the budget."""
        logits = self._logits("first_out", budget.known + self._normed_product(self._prompt_in, prompt))
        return logits[: self._tiers], logits[self._tiers :]

    def second(self, states: Array, tier: int, pause: int) -> Logits:
        """Stage 2: logits of top-k and of numbers of blocks, from states [2, H] and the places of stage 1's choice.

        What is no longer possible has -inf.
        """
        inner = self._chosen[tier, pause]
        for pieces, state in zip(self._states_in, states, strict=True):
            inner = inner + self._normed_product(pieces, state)
        logits = self._logits("second_out", inner)
        possible = zip(logits[self._top_ks :], self._possible[pause], strict=True)
        return logits[: self._top_ks], [each if is_possible else -math.inf for each, is_possible in possible]

    def _normed_product(self, pieces: Array, state: Array) -> Array:
        """The product [w] of [P, w / P, H] and the state [H] brought to mean 0 and variance 1."""
        centred = state - float(state @ self._mean)
        scale = 1 / math.sqrt(float(centred @ centred) / len(centred) + NORM_EPS)
        return (pieces @ centred).reshape(-1) * scale

    def _logits(self, name: str, inner: Array) -> list[float]:
        logits = (self._weights[f"{name}.weight"] @ _gelu(inner)).tolist()
        return [each + bias for each, bias in zip(logits, self._biases[name], strict=True)]


def _pieces(weight: Array) -> Array:
    """A weight [w, H] in pieces [P, w / P, H], each with MOST_WEIGHTS or one row."""
    rows, width = weight.shape
    each = max((size for size in range(1, rows + 1) if rows % size == 0 and size * width <= MOST_WEIGHTS), default=1)
    return np.ascontiguousarray(weight).reshape(rows // each, each, width)


def _gelu(values: Array) -> Array:
    root = math.sqrt(0.5)
    return np.array([0.5 * each * (1.0 + math.erf(root * each)) for each in values.tolist()], dtype=np.float32)
