"""An environment that runs every request on the model with batch 1 and measures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.models.molmoe.staged_model import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import Answer, Metric, answer_to
from experiments.controller.networks.action_logits import action_logits_for
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.running.adaptive_generation import AdaptiveModel, AdaptiveRequest, AdaptiveRun
from experiments.controller.running.deciders import FixedDecider, NetworkDecider
from experiments.controller.running.live import LiveRequest
from experiments.controller.training.environment import BudgetedRequests, RollOut


@dataclass(eq=False)
class LiveEnvironment:
    """An environment whose latency is `AdaptiveTimes.total_s` of the very run, with the time of the networks in it.

    The gradient of the budget token does not go through the model: its first layer learns by stage 1, its second one
    stays as it began.

    An answer's score does not depend on the other requests of the same update: see `score_fractions_among`.

    Args:
        budgets_s: lowest and highest budget; budgets are drawn evenly between.

    Raises:
        ConfigurationError: the metric has no scores for answers to these requests.
    """

    model: MolmoeStagedModel
    metric: Metric
    requests: Sequence[LiveRequest]
    space: ActionSpace
    blocks: BlockChoice
    max_new_tokens: int
    budgets_s: tuple[float, float]
    described: Mapping[str, Any]
    budget_token_is_fixed: bool = False

    def __post_init__(self) -> None:
        check_scored(self.metric, self.requests)
        self.hidden_size = int(self.model.model.config.text_config.hidden_size)

    def describe(self) -> Mapping[str, Any]:
        """See `Environment.describe`."""
        return self.described

    def draw(self, count: int, generator: torch.Generator) -> BudgetedRequests:
        """See `Environment.draw`."""
        samples = torch.randint(len(self.requests), (count,), generator=generator)
        low, high = self.budgets_s
        budgets = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
        return BudgetedRequests(samples, torch.zeros_like(samples), budgets)

    def roll_out(
        self, networks: TwoStageNetworks, budgeted: BudgetedRequests, generator: torch.Generator | None
    ) -> RollOut:
        """See `Environment.roll_out`; runs one request after the other."""
        decider = NetworkDecider(action_logits_for(self.model, networks), networks.space, generator)
        answering = AdaptiveModel(self.model, decider, self.blocks)
        answering.warm_up([request_of(each, self.max_new_tokens) for each in self.requests])
        runs, seen = [], []
        for place, budget_s in zip(budgeted.samples.tolist(), budgeted.budgets_s.tolist(), strict=True):
            runs.append(answering.adaptive_generate(request_of(self.requests[place], self.max_new_tokens), budget_s))
            seen.append(decider.seen)
        prompts, states, actions = zip(*seen, strict=True)
        return RollOut(
            budgeted=budgeted,
            prompts=torch.stack(prompts),
            states=torch.stack(states),
            actions=torch.tensor(actions),
            accuracy=self._accuracy(budgeted.samples.tolist(), runs),
            latency_s=torch.tensor([run.times.total_s for run in runs], dtype=torch.float64),
        )

    def _accuracy(self, places: Sequence[int], runs: Sequence[AdaptiveRun]) -> torch.Tensor:
        is_open = self.model.ends.is_thinking_open
        answers = [answer_to(self.requests[at].sample, run.text, is_open) for at, run in zip(places, runs, strict=True)]
        return torch.tensor(score_fractions_among(self.metric, self.requests, answers), dtype=torch.float64)


def score_fractions_among(metric: Metric, requests: Sequence[LiveRequest], answers: Sequence[Answer]) -> list[float]:
    """Each answer's score as a fraction of the metric's best, scored among answers to all of the requests.

    A metric that scores answers together, `cider_score`, takes its document frequencies from the references of all
    pictures that it is given. Empty answers to all requests are added to the answers, so that these are always the
    references of the same pictures, whichever of them were requested.

    Raises:
        ConfigurationError: the metric has no score for them (CIDEr of fewer than two pictures).
    """
    beside = [] if metric.scores_each_answer else [answer_to(each.sample, "") for each in requests]
    values = [score.value for score in metric.score([*answers, *beside]).scores[: len(answers)]]
    known = [value / metric.best for value in values if value is not None]
    if len(known) < len(values):
        pictures = len({each.sample.image_id for each in requests})
        raise ConfigurationError(
            f"{metric.name} has no scores for {len(requests)} samples of {pictures} picture{'s' * (pictures != 1)}; "
            "give samples of more pictures (--num_samples)"
        )
    return known


def check_scored(metric: Metric, requests: Sequence[LiveRequest]) -> None:
    """Raises ConfigurationError where answers to these requests have no scores, before any of them is run."""
    score_fractions_among(metric, requests, [answer_to(each.sample, "") for each in requests])


def request_of(request: LiveRequest, max_new_tokens: int) -> AdaptiveRequest:
    """A prepared sample in the form that adaptive inference takes."""
    return AdaptiveRequest(request.sample, request.prompt, max_new_tokens, request.prepared)


def measured_range(
    model: MolmoeStagedModel,
    requests: Sequence[LiveRequest],
    space: ActionSpace,
    blocks: BlockChoice,
    max_new_tokens: int,
) -> tuple[float, float]:
    """The budgets' range in seconds: median at the lowest values of all knobs, 95th percentile at the highest."""
    times = []
    for choice in (space.knobs.lowest, space.knobs.full):
        answering = AdaptiveModel(model, FixedDecider(choice, 1), blocks)
        adaptive = [request_of(each, max_new_tokens) for each in requests]
        answering.warm_up(adaptive)
        runs = [answering.adaptive_generate(each, 1.0) for each in adaptive]
        times.append([run.times.total_s for run in runs])
    return float(np.median(times[0])), float(np.percentile(times[1], 95))
