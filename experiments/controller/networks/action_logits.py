"""The logits of the controller's actions for a running request, by the GPU or by the host."""

from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from experiment_core_utils.models.common.cuda_graphs import GraphCapturer
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory
from experiments.controller.networks.on_device import DeviceActionLogits
from experiments.controller.networks.on_host import CACHED_BUDGETS, HostBudget, HostNetworks, Logits
from experiments.controller.networks.two_stage import TwoStageNetworks


class ActionLogits(Protocol):
    """Logits of both stages' actions for one request at a time; see `Logits`; impossible values have -inf."""

    @property
    def reason(self) -> str | None:
        """The reason why the host computes them and not the model's GPU; None where the GPU does, and on a CPU."""

    def warm_up(self, most_ids: int) -> None:
        """Prepare for prompts of so many ids."""

    def first(self, ids: torch.Tensor, budget_s: float) -> Logits:
        """Stage 1: logits of tiers and of pauses. Ids [T] of the prompt's text, on the host."""

    def token(self) -> torch.Tensor:
        """The budget token [1, 1, H] on the device, for the budget of the last call of `first`."""

    def rehearse(self) -> None:
        """Run the steps of `second` while the device is busy, so that the host's caches contain them afterwards."""

    def second(self, states: torch.Tensor, tier: int, pause: int) -> Logits:
        """Stage 2: logits of top-k and of numbers of blocks, given states [2, H] and stage 1's choice."""

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt [H] and states [2, H] of the last request, in float32 on the host."""


class HostActionLogits:
    """`ActionLogits` by arrays on the host, stage 2 from one copy of the device's states.

    Args:
        embeddings: of tokens, [V, H] float32 on the host.
        device: where budget tokens go.
        reason: why the device does not compute them; None on a CPU.
    """

    def __init__(
        self, networks: TwoStageNetworks, embeddings: np.ndarray, device: torch.device, reason: str | None = None
    ) -> None:
        self.reason = reason
        self._networks = HostNetworks(networks)
        self._embeddings = embeddings
        self._device = device
        self._prompt, self._token = torch.empty(0), torch.empty(0)
        self._states = torch.zeros(2, networks.hidden_size)
        self._budget = lru_cache(CACHED_BUDGETS)(self._new_budget)

    def warm_up(self, most_ids: int) -> None:
        """See `ActionLogits.warm_up`; nothing has to be prepared."""

    def first(self, ids: torch.Tensor, budget_s: float) -> Logits:
        """See `ActionLogits.first`."""
        self._prompt = mean_embedding(self._embeddings, ids)
        budget, self._token = self._budget(budget_s)
        return self._networks.first(self._prompt.numpy(), budget)

    def token(self) -> torch.Tensor:
        """See `ActionLogits.token`."""
        return self._token

    def rehearse(self) -> None:
        """See `ActionLogits.rehearse`; uses the states of the previous request. On the CPU nothing runs meanwhile."""
        if self._device.type != "cpu":
            self._networks.second(self._states.numpy(), 0, 0)

    def second(self, states: torch.Tensor, tier: int, pause: int) -> Logits:
        """See `ActionLogits.second`."""
        self._states = states.to("cpu", torch.float32)
        return self._networks.second(self._states.numpy(), tier, pause)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ActionLogits.seen`."""
        return self._prompt, self._states

    def _new_budget(self, budget_s: float) -> tuple[HostBudget, torch.Tensor]:
        """A budget whose token is being copied to the device."""
        budget = self._networks.budget(budget_s)
        return budget, torch.from_numpy(budget.token)[None, None].to(self._device, non_blocking=True)


def mean_embedding(embeddings: np.ndarray, ids: torch.Tensor) -> torch.Tensor:
    """The input of stage 1: the mean [H] of a prompt's embeddings, from rows [V, H] and ids [T]; zeros without ids."""
    rows = embeddings[ids.numpy()]
    return torch.from_numpy(np.add.reduce(rows) * np.float32(1 / max(len(rows), 1)))


def action_logits_for(
    model: MolmoeStagedModel, networks: TwoStageNetworks, graph_capturer: GraphCapturer | None = None
) -> ActionLogits:
    """The logits of the networks as they are now, by a GPU that has kernels and memory for them, else by the host.

    Args:
        graph_capturer: see `DeviceActionLogits`.
    """
    if model.device.type == "cpu":
        return HostActionLogits(networks, model.host_embeddings, model.device)
    try:
        with out_of_memory_named():
            return DeviceActionLogits(networks, model.model.get_input_embeddings().weight.detach(), graph_capturer)
    except (ConfigurationError, OutOfMemory) as error:
        return HostActionLogits(networks, model.host_embeddings, model.device, str(error))
