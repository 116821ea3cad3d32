"""In: trained networks and a table of embeddings on a GPU; out: both stages' odds there, each by one launch.

What a stage asks is written where the device fetches it, its graph is launched, and its odds come back by themselves:
the host waits once. Importing this module does not need Triton, making the odds does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.graph_capture import CudaGraphs, Recorder
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.triton_building import built
from experiments.controller.device_question import DeviceQuestion
from experiments.controller.host_networks import KEPT_BUDGETS, HostNetworks, Odds
from experiments.controller.two_stage_networks import TwoStageNetworks

# Ids of a prompt's text for which there is room at first.
USUAL_IDS = 256
# Their number and the place of the budget stand before them.
BEFORE_IDS = 2


@dataclass(frozen=True)
class _KeptBudget:
    """Where a budget's part is, and its token [1, 1, H]."""

    place: int
    token: torch.Tensor


class DeviceOdds:
    """`StageOdds` by Triton's kernels, replayed; networks as they were when this was made, in float32.

    Args:
        embeddings: of tokens, [V, H] on the device.
        recorder: makes the replays; None for CUDA graphs.
        kept_budgets: whose part and token stay on the device.

    Attributes:
        reason: always None.

    Raises:
        ConfigurationError: Triton is missing, or the kernels cannot be built or captured.
    """

    reason: None = None

    def __init__(
        self,
        networks: TwoStageNetworks,
        embeddings: torch.Tensor,
        recorder: Recorder | None = None,
        kept_budgets: int = KEPT_BUDGETS,
    ) -> None:
        self._kernels = _kernels()
        self._host = HostNetworks(networks)
        self._pauses = len(networks.space.pauses)
        self._embeddings = embeddings
        self._device = embeddings.device
        self._recorder = CudaGraphs(self._device) if recorder is None else recorder
        hidden, width = networks.hidden_size, len(networks.prompt_in.bias)
        self._budgets: dict[float, _KeptBudget] = {}
        self._budget = _KeptBudget(0, torch.empty(0))
        self._known, self._tokens = self._zeros(kept_budgets, width), self._zeros(kept_budgets, hidden)
        self._prompt, self._states, self._inner = self._zeros(1, hidden), self._zeros(2, hidden), self._zeros(width)
        with built("the kernels of the controller", ConfigurationError):
            self._first_layers = self._layers(networks.prompt_in, self._known, networks.first_out)
            self._first = self._stage_of_prompt(USUAL_IDS)
            chosen = torch.from_numpy(self._host.chosen).flatten(0, 1).to(self._device)
            self._second = self._stage_of_states(self._layers(networks.states_in, chosen, networks.second_out))

    def make_ready(self, most_ids: int) -> None:
        """See `StageOdds.make_ready`; a longer prompt is captured when it comes."""
        if most_ids > len(self._first.asked) - BEFORE_IDS:
            self._first = self._stage_of_prompt(2 * most_ids)

    def first(self, ids: torch.Tensor, budget_s: float) -> Odds:
        """See `StageOdds.first`."""
        self.make_ready(len(ids))
        asked, self._budget = self._first.asked, self._budgets.get(budget_s) or self._new_budget(budget_s)
        asked[0], asked[1] = len(ids), self._budget.place
        asked[BEFORE_IDS : BEFORE_IDS + len(ids)] = ids.numpy()
        return self._host.split_first(self._first.answer())

    def token(self) -> torch.Tensor:
        """See `StageOdds.token`."""
        return self._budget.token

    def rehearse(self) -> None:
        """See `StageOdds.rehearse`; the host computes next to nothing."""

    def second(self, states: torch.Tensor, tier: int, pause: int) -> Odds:
        """See `StageOdds.second`."""
        self._states.copy_(states)
        self._second.asked[0] = tier * self._pauses + pause
        return self._host.split_second(self._second.answer(), pause)

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StageOdds.seen`."""
        return self._prompt[0].cpu(), self._states.cpu()

    def _new_budget(self, budget_s: float) -> _KeptBudget:
        """Its part and its token on their way to the device, in place of the oldest where there is no room."""
        place = len(self._budgets)
        if place == len(self._known):
            place = self._budgets.pop(next(iter(self._budgets))).place
        budget = self._host.budget(budget_s)
        self._known[place].copy_(torch.from_numpy(budget.known))
        self._tokens[place].copy_(torch.from_numpy(budget.token))
        kept = self._budgets[budget_s] = _KeptBudget(place, self._tokens[place][None, None])
        return kept

    def _stage_of_prompt(self, ids: int) -> DeviceQuestion:
        """Of a number of ids, the place of a budget, and ids."""

        def work(asked: torch.Tensor, odds: torch.Tensor) -> None:
            self._kernels.launch_mean_row(asked[BEFORE_IDS:], asked[:1], self._embeddings, self._prompt[0])
            self._kernels.launch_odds(self._first_layers, self._prompt, asked[1:], self._inner, odds)

        room, answers = BEFORE_IDS + ids, len(self._first_layers.out_bias)
        return DeviceQuestion(room, answers, work, self._device, self._recorder)

    def _stage_of_states(self, layers: Any) -> DeviceQuestion:
        """Of the place of stage 1's choice; the states are on the device."""

        def work(asked: torch.Tensor, odds: torch.Tensor) -> None:
            self._kernels.launch_odds(layers, self._states, asked, self._inner, odds)

        return DeviceQuestion(1, len(layers.out_bias), work, self._device, self._recorder)

    def _layers(self, into: nn.Linear, known: torch.Tensor, out: nn.Linear) -> Any:
        """Their weights as they are now; `known` has the first one's bias in it."""
        weight = self._copied(into.weight).unflatten(1, (-1, self._prompt.shape[1]))
        return self._kernels.OddsLayers(weight, known, self._copied(out.weight), self._copied(out.bias))

    def _copied(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to(self._device, torch.float32, copy=True).contiguous()

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self._device)


def _kernels() -> Any:
    try:
        from experiments.controller import odds_kernels
    except ImportError as error:
        raise ConfigurationError(f"the controller's kernels need Triton: {error}") from error
    return odds_kernels
