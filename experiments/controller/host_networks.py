"""In: trained networks; out: the odds that they give one request, by a few products of arrays on the host.

At batch 1 networks of some ten thousand parameters cost a GPU their launches and nothing else, and modules cost the
host more than their arithmetic does.
"""

import math

import numpy as np
import torch

from experiments.controller.budget_token import FREQUENCIES, LONGEST_PERIOD, SHORTEST_PERIOD
from experiments.controller.two_stage_networks import ActionSpace, TwoStageNetworks

Array = np.ndarray
# As of `layer_norm` and of the budget token.
NORM_EPS, RMS_EPS = np.float32(1e-5), np.float32(1e-8)


class HostNetworks:
    """`TwoStageNetworks` as they were when this was made, in float32; the numbers differ by rounding alone."""

    def __init__(self, networks: TwoStageNetworks) -> None:
        self.space: ActionSpace = networks.space
        self._weights = {name: _frozen(tensor) for name, tensor in networks.state_dict().items()}
        steps = np.linspace(0.0, 1.0, FREQUENCIES)
        self._turns = 2 * math.pi / (LONGEST_PERIOD * (SHORTEST_PERIOD / LONGEST_PERIOD) ** steps)
        self._impossible = ~np.array(networks.space.possible)

    def code(self, budget_s: float) -> Array:
        """What stage 1 reads of the budget: [CODE_WIDTH]."""
        angles = math.log(budget_s * 1e3) * self._turns
        features = np.concatenate([np.sin(angles), np.cos(angles)]).astype(np.float32)
        return _gelu(self._linear("budget.encode", features))

    def token(self, code: Array) -> Array:
        """[CODE_WIDTH] -> the budget token's embedding [H]."""
        raw = self._linear("budget.embed", code)
        scale = self._weights["budget.embedding_rms"] / np.sqrt(np.dot(raw, raw) / np.float32(len(raw)) + RMS_EPS)
        return np.asarray(raw * scale, dtype=np.float32)

    def first(self, prompt: Array, code: Array) -> tuple[Array, Array]:
        """Stage 1: the prompt [H] and the budget's code -> log odds of tiers and of pauses, not normalised."""
        inner = self._linear("prompt_in", _normed(prompt)) + self._weights["code_in.weight"] @ code
        odds = self._linear("first_out", _gelu(inner))
        tiers = len(self.space.knobs.tiers)
        return odds[:tiers], odds[tiers:]

    def second(self, states: Array, tier: int, pause: int) -> tuple[Array, Array]:
        """Stage 2: states [2, H] and the places of stage 1's choice -> log odds of top-k and of numbers of blocks.

        What is no longer possible has -inf.
        """
        known = self._weights["chosen_in.weight"]
        inner = self._linear("states_in", np.concatenate([_normed(row) for row in states]))
        inner += known[tier] + known[pause + len(self.space.knobs.tiers)]
        odds = self._linear("second_out", _gelu(inner))
        top_ks = len(self.space.knobs.top_ks)
        blocks = odds[top_ks:]
        blocks[self._impossible[pause]] = -np.inf
        return odds[:top_ks], blocks

    def _linear(self, name: str, given: Array) -> Array:
        return np.asarray(self._weights[f"{name}.weight"] @ given + self._weights[f"{name}.bias"])


def _frozen(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().to("cpu", torch.float32).numpy(), order="C")


def _normed(state: Array) -> Array:
    """[H] to mean 0 and variance 1."""
    centred = state - state.mean()
    return np.asarray(centred / np.sqrt(np.dot(centred, centred) / np.float32(len(state)) + NORM_EPS))


def _gelu(values: Array) -> Array:
    halves = [0.5 * each * (1.0 + math.erf(each * math.sqrt(0.5))) for each in values.tolist()]
    return np.array(halves, dtype=np.float32)
