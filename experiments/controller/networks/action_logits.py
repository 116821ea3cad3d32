"""The logits of the controller's actions for a running request, by arrays on the host."""

from functools import lru_cache

import numpy as np
import torch

from experiment_core_utils.models.pausable import PausableModel
from experiments.controller.networks.on_host import HostBudget, HostNetworks, Logits
from experiments.controller.networks.two_stage import TwoStageNetworks

# Budgets of which what depends on them alone is kept.
CACHED_BUDGETS = 256


class ActionLogits:
    """Logits of both stages' actions for one request at a time; see `Logits`; impossible values have -inf.

    Args:
        networks: taken as they are now.
        embeddings: of tokens, [V, H] float32 on the host.
        device: where budget tokens go, and states come from in one copy.
    """

    def __init__(self, networks: TwoStageNetworks, embeddings: np.ndarray, device: torch.device) -> None:
        self._networks = HostNetworks(networks)
        self._embeddings = embeddings
        self._device = device
        self._prompt, self._token = torch.empty(0), torch.empty(0)
        self._states = torch.zeros(2, networks.hidden_size)
        self._budget = lru_cache(CACHED_BUDGETS)(self._new_budget)

    @classmethod
    def for_model(cls, model: PausableModel, networks: TwoStageNetworks) -> "ActionLogits":
        """The logits for requests of a model."""
        return cls(networks, model.host_embeddings, model.device)

    def first(self, ids: torch.Tensor, budget_s: float) -> Logits:
        """Stage 1: logits of tiers and of pauses. Ids [T] of the prompt's text, on the host."""
        self._prompt = mean_embedding(self._embeddings, ids)
        budget, self._token = self._budget(budget_s)
        return self._networks.first(self._prompt.numpy(), budget)

    def token(self) -> torch.Tensor:
        """The budget token [1, 1, H] on the device, for the budget of the last call of `first`."""
        return self._token

    def rehearse(self) -> None:
        """Run the steps of `second` while a device is busy, so that the host's caches contain them afterwards.

        It uses the states of the previous request. On a CPU nothing runs meanwhile.
        """
        if self._device.type != "cpu":
            self._networks.second(self._states.numpy(), 0, 0)

    def second(self, states: torch.Tensor, tier: int, pause: int) -> Logits:
        """Stage 2: logits of top-k and of numbers of blocks, given states [2, H] and stage 1's choice."""
        self._states = states.to("cpu", torch.float32)
        return self._networks.second(self._states.numpy(), tier, pause)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt [H] and states [2, H] of the last request, in float32 on the host."""
        return self._prompt, self._states

    def _new_budget(self, budget_s: float) -> tuple[HostBudget, torch.Tensor]:
        """A budget whose token is being copied to the device."""
        budget = self._networks.budget(budget_s)
        return budget, torch.from_numpy(budget.token)[None, None].to(self._device, non_blocking=True)


def mean_embedding(embeddings: np.ndarray, ids: torch.Tensor) -> torch.Tensor:
    """The input of stage 1: the mean [H] of a prompt's embeddings, from rows [V, H] and ids [T]; zeros without ids."""
    rows = embeddings[ids.numpy()]
    return torch.from_numpy(np.add.reduce(rows) * np.float32(1 / max(len(rows), 1)))
