"""In: trained networks; out: what an evaluation asks of a policy, on recorded states or on the running model."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from experiment_core_utils.config.block_choice import BlockChoice
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.adaptive_generation import AdaptiveModel
from experiments.controller.deciders import NetworkDecider
from experiments.controller.host_networks import HostNetworks
from experiments.controller.knob_choices import KnobChoice
from experiments.controller.live import AdaptiveAnswer, LiveRequest
from experiments.controller.live_environment import request_of
from experiments.controller.policies import RequestFeatures, check_budget
from experiments.controller.recorded_states import RecordedStates
from experiments.controller.stage_odds import StageOdds
from experiments.controller.two_stage_networks import ActionSpace, TwoStageNetworks


class RecordedTwoStage:
    """The two stages' likeliest choices from recorded states; a `Policy`.

    Stage 1 sees the budget itself; stage 2 the budget token of the recorded budget that is nearest by ratio.
    """

    def __init__(self, networks: TwoStageNetworks, states: RecordedStates, name: str = "two_stage") -> None:
        self._networks = HostNetworks(networks)
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
        odds = self._networks.first(self._states.prompts[place].numpy(), self._networks.budget(budget_s))
        tier, pause = (each.index(max(each)) for each in odds)
        level = int((self._states.budgets_s.log() - torch.tensor(budget_s, dtype=torch.float64).log()).abs().argmin())
        states = torch.stack([self._states.last[place, tier, pause], self._states.tokens[place, tier, pause, level]])
        odds = self._networks.second(states.numpy(), tier, pause)
        top_k, blocks = (each.index(max(each)) for each in odds)
        knobs = self._space.knobs
        return KnobChoice(knobs.tiers[tier], knobs.top_ks[top_k], knobs.block_counts[blocks])

    @cached_property
    def _places(self) -> Mapping[tuple[str, int], int]:
        return {key: place for place, key in enumerate(self._states.keys)}


class TwoStageController:
    """The two stages inside the running model; a `Controller`. Their time is within the latency.

    Attributes:
        host_reason: see `StageOdds.reason`.
    """

    def __init__(
        self,
        odds: StageOdds,
        space: ActionSpace,
        model: MolmoeStagedModel,
        blocks: BlockChoice,
        max_new_tokens: int,
        name: str = "two_stage",
    ) -> None:
        self.host_reason = odds.reason
        decider = NetworkDecider(odds, space)
        self._answering = AdaptiveModel(model, decider, blocks)
        self._limit = max_new_tokens
        self._name = name

    @property
    def name(self) -> str:
        """See `Controller.name`."""
        return self._name

    def warm_up(self, requests: Sequence[LiveRequest]) -> None:
        """Prepare for these requests at all decisions that are possible; never timed."""
        self._answering.warm_up([request_of(each, self._limit) for each in requests])

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """See `Controller.answer`; the setting in force before comes back."""
        run = self._answering.adaptive_generate(request_of(request, self._limit), budget_s)
        total_s = run.times.total_s
        return AdaptiveAnswer(run.choice, run.token_ids, total_s, run.times.controller_s, total_s)
