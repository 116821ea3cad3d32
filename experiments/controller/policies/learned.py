"""Trained networks as a policy on recorded states, and as a controller inside the running model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.pausable import PausableModel
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.on_host import HostNetworks
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.policies.interface import RequestFeatures, check_budget
from experiments.controller.provenance import (
    network_differences,
    refuse_other_source,
    refuse_other_weights,
    replay_leaks,
)
from experiments.controller.running.adaptive_generation import AdaptiveModel, request_of
from experiments.controller.running.deciders import NetworkDecider
from experiments.controller.running.live import AdaptiveAnswer, LiveRequest
from experiments.controller.training.recorded_states import (
    STATES,
    RecordedStates,
    load_states,
    missing_caveats,
    without_states,
)
from experiments.controller.training.replay_environment import has_states, with_states
from experiments.controller.training.run import load_networks


class RecordedTwoStage:
    """A `Policy` with the two stages' likeliest choices from recorded states.

    Stage 1 sees the budget itself; stage 2 the budget token of the recorded budget that is nearest by ratio.
    """

    name = "two_stage"

    def __init__(self, networks: TwoStageNetworks, states: RecordedStates) -> None:
        self._networks = HostNetworks(networks)
        self._space = networks.space
        self._states = states

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        """A request without recorded states raises ConfigurationError, too."""
        check_budget(budget_s)
        place = self._places.get((request.task, request.sample_id))
        if place is None:
            raise ConfigurationError(
                f"sample {request.sample_id} of {request.task} has no recorded states; record them, or evaluate live"
            )
        logits = self._networks.first(self._states.prompts[place].numpy(), self._networks.budget(budget_s))
        tier, pause = (each.index(max(each)) for each in logits)
        level = int((self._states.budgets_s.log() - torch.tensor(budget_s, dtype=torch.float64).log()).abs().argmin())
        states = torch.stack([self._states.last[place, tier, pause], self._states.tokens[place, tier, pause, level]])
        logits = self._networks.second(states.numpy(), tier, pause)
        return self._space.knobs.at(tier, *(each.index(max(each)) for each in logits))

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], int]:
        return {key: place for place, key in enumerate(self._states.keys)}


class TwoStageController:
    """A `Controller` with the two stages inside the running model. Their time is within the latency."""

    name = "two_stage"

    def __init__(
        self,
        logits: ActionLogits,
        space: ActionSpace,
        model: PausableModel,
        blocks: BlockChoice,
        max_new_tokens: int,
    ) -> None:
        self._answering = AdaptiveModel(model, NetworkDecider(logits, space), blocks)
        self._limit = max_new_tokens

    def warm_up(self, requests: Sequence[LiveRequest]) -> None:
        """Prepare for these requests at all decisions that are possible; never timed."""
        self._answering.warm_up([request_of(request, self._limit) for request in requests])

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """The setting in force before is restored."""
        run = self._answering.adaptive_generate(request_of(request, self._limit), budget_s)
        total_s = run.times.total_s
        return AdaptiveAnswer(run.choice, run.token_ids, total_s, run.times.controller_s, total_s)


NOT_IN_A_REPLAY = ControllerCaveat.of("networks_apart")


@dataclass(frozen=True)
class LearnedReplay:
    """A trained policy and the grid's requests that it has states for."""

    policy: RecordedTwoStage
    grid: MeasuredGrid  #: without the requests that have no states
    caveats: tuple[ControllerCaveat, ...]
    num_without_states: int  #: how many those are


def learned_replay(
    checkpoint: Path, states_file: Path | None, calibration: MeasuredGrid, grid: MeasuredGrid
) -> LearnedReplay:
    """The checkpoint's policy on a grid.

    Args:
        states_file: None for `states.pt` beside the checkpoint.

    Raises:
        ConfigurationError: checkpoint or states are of another model than the grid, or the states of another split.
        ResultsError: a file is no such file, the states are of other networks, or the grid has none of their samples.
    """
    networks = load_networks(checkpoint)
    path = states_file or checkpoint.with_name(STATES.usual_name)
    states = load_states(path)
    refuse_other_source(grid, states.splits, states.model["name"], path)
    refuse_other_weights(checkpoint, path, states.model)
    if network_differences(states, networks):
        raise ResultsError(
            f"the states were recorded with another budget token or other knobs than {checkpoint} has; give the "
            "states.pt of its training"
        )
    known = with_states(grid, states)
    missing = without_states(states, grid.keys)
    usable = calibration.take(calibration.is_complete & has_states(calibration, states))
    caveats = [
        NOT_IN_A_REPLAY,
        *[
            each.model_copy(update={"advice": "no policy is evaluated on them"})
            for each in missing_caveats(missing, len(grid))
        ],
        *replay_leaks(checkpoint, usable),
    ]
    return LearnedReplay(RecordedTwoStage(networks, states), known, tuple(caveats), len(missing))
