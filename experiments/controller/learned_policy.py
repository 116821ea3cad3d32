"""In: trained networks; out: what an evaluation asks of a policy, on recorded states or on the running model."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from experiment_core_utils.models.molmoe.staged import MolmoeStagedModel
from experiment_core_utils.primitives.block_choice import BlockChoice
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.adaptive_generation import AdaptiveModel
from experiments.controller.deciders import NetworkDecider
from experiments.controller.knob_choices import KnobChoice
from experiments.controller.live import AdaptiveAnswer, LiveRequest
from experiments.controller.live_environment import request_of
from experiments.controller.policies import RequestFeatures, check_budget
from experiments.controller.recorded_states import RecordedStates
from experiments.controller.two_stage_networks import TwoStageNetworks


class RecordedTwoStage:
    """The two stages' likeliest choices from recorded states; a `Policy`.

    Stage 1 sees the budget itself; stage 2 the budget token of the recorded budget that is nearest by ratio.
    """

    def __init__(self, networks: TwoStageNetworks, states: RecordedStates, name: str = "two_stage") -> None:
        self._decider = NetworkDecider(networks)
        self._space = networks.space
        self._states = states
        self._name = name

    @property
    def name(self) -> str:
        """See `Policy.name`."""
        return self._name

    def choose(self, request: RequestFeatures, budget_s: float) -> KnobChoice:
        """See `Policy.choose`; raises ConfigurationError also for a request without recorded states."""
        check_budget(budget_s)
        place = self._places.get((request.task, request.sample_id))
        if place is None:
            raise ConfigurationError(
                f"sample {request.sample_id} of {request.task} has no recorded states; record them, or evaluate live"
            )
        first, _ = self._decider.first(self._states.prompts[place], budget_s)
        tier, pause = self._space.knobs.tiers.index(first.tier), self._space.pauses.index(first.pause)
        level = int((self._states.budgets_s.log() - torch.tensor(budget_s, dtype=torch.float64).log()).abs().argmin())
        states = [self._states.last[place, tier, pause], self._states.tokens[place, tier, pause, level]]
        second = self._decider.second(torch.stack(states))
        return KnobChoice(first.tier, second.top_k, second.num_active_blocks)

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], int]:
        return {key: place for place, key in enumerate(self._states.keys)}


class TwoStageController:
    """The two stages inside the running model; a `Controller`. Their time is within the latency."""

    def __init__(
        self,
        networks: TwoStageNetworks,
        model: MolmoeStagedModel,
        blocks: BlockChoice,
        max_new_tokens: int,
        name: str = "two_stage",
    ) -> None:
        self._answering = AdaptiveModel(model, NetworkDecider(networks.to(model.device)), blocks)
        self._limit = max_new_tokens
        self._name = name

    @property
    def name(self) -> str:
        """See `Controller.name`."""
        return self._name

    def make_ready(self, requests: Sequence[LiveRequest]) -> None:
        """All that these requests need at whatever may be decided; never timed."""
        self._answering.make_ready([request_of(each, self._limit) for each in requests])

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """See `Controller.answer`; the setting in force before comes back."""
        run = self._answering.adaptive_generate(request_of(request, self._limit), budget_s)
        total_s = run.times.total_s
        return AdaptiveAnswer(run.choice, run.token_ids, total_s, run.times.controller_s, total_s)
