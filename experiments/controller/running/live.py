"""Requests run one by one under policies and budgets, with what each really took and scored."""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.batches import PreparedQuestion, answer_prepared
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import out_of_memory_named, synchronize
from experiment_core_utils.primitives.errors import SampleError, library_faults_named
from experiment_core_utils.primitives.finite_logits import failure_named
from experiment_core_utils.records.requests import PreparedRequest
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, Task, answer_to
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiments.controller.evaluation.outcomes import AnsweredRequests, Outcomes
from experiments.controller.knob_choices import KnobSpace, tier_of
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import PictureShape, Policy, RequestFeatures


@dataclass(frozen=True)
class LiveRequest:
    """A sample prepared at every tier, on the host."""

    sample: Sample
    prompt: str
    prepared: Mapping[str, PreparedRequest]  #: tier -> tensors
    features: RequestFeatures


@dataclass(frozen=True)
class AdaptiveAnswer:
    """The answer to one request at knobs chosen for it; times in seconds."""

    choice: Setting
    token_ids: tuple[int, ...]  #: end-of-sequence included where it came
    total_s: float  #: `T_total`, from the request handed to the model to its last token on the host
    overhead_s: float  #: choosing and putting the choice in force
    #: what is compared with the budget: both, where the choice is made before the clock of `total_s` starts; `total_s`
    #: alone where it is made inside
    latency_s: float


class Controller(Protocol):
    """Answers a request within a budget, in whatever way it chooses the knobs."""

    @property
    def name(self) -> str:
        """Name of the policy in tables."""

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """Run the request with batch 1, and measure it; any setting may be in force afterwards."""


@dataclass(frozen=True)
class ChosenBefore:
    """A controller by a policy that chooses all knobs before the model runs."""

    policy: Policy
    model: StagedModel
    space: KnobSpace
    blocks: BlockChoice
    max_new_tokens: int

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self.policy.name

    def answer(self, request: LiveRequest, budget_s: float) -> AdaptiveAnswer:
        """See `Controller.answer`.

        As everywhere in this project, tensors are on the device and the setting is warmed up before the clock starts.

        Raises:
            EngineRefused: the setting cannot run as the others do.
        """
        started = time.perf_counter()
        choice = self.policy.choose(request.features, budget_s)
        self.model.apply(self.space.setting(choice, self.blocks))
        overhead_s = time.perf_counter() - started
        inputs = self.model.to_device(request.prepared[tier_of(choice)].inputs)
        self.model.warm_up(inputs, self.max_new_tokens)
        synchronize(self.model.device)
        with failure_named(f"sample {request.sample.sample_id}", self.model.describe):
            run = run_staged(self.model, inputs, self.max_new_tokens)
        latency_s = run.total_s + overhead_s
        if isinstance(self.policy, FeedbackPolicy):
            self.policy.observe(choice, latency_s)
        return AdaptiveAnswer(choice, run.token_ids, run.total_s, overhead_s, latency_s)


def prepare_requests(
    model: StagedModel, task: Task, sample_ids: Sequence[int], tiers: Sequence[str]
) -> tuple[list[LiveRequest], dict[int, str]]:
    """The samples at every tier, and those that cannot be used -> the reason."""
    requests, failed = [], {}
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"):
                requests.append(_prepare(model, task, task[sample_id], tiers))
        except SampleError as error:
            failed[sample_id] = str(error)
    return requests, failed


def _prepare(model: StagedModel, task: Task, sample: Sample, tiers: Sequence[str]) -> LiveRequest:
    prompt = prompt_for(task, sample, model.prompt_family)
    prepared = {tier: model.prepare(sample, prompt, tier_target(tier).crops) for tier in tiers}
    # Without a picture, or with one that is not cut, there are no crops. A model in this process counts its tokens.
    shapes = {
        tier: PictureShape((each.shape.actual and each.shape.actual.crops_if_cut) or 0, each.shape.vision_tokens or 0)
        for tier, each in prepared.items()
    }
    text_tokens = prepared[tiers[0]].shape.text_tokens or 0
    features = RequestFeatures(task.name, sample.sample_id, text_tokens, shapes, None, prompt)
    return LiveRequest(sample, prompt, prepared, features)


def requests_that_run(
    model: StagedModel, space: KnobSpace, blocks: BlockChoice, requests: Sequence[LiveRequest]
) -> tuple[list[LiveRequest], dict[int, str]]:
    """The requests whose first token can be computed with all knobs at their highest values; the others -> the reason.

    Raises:
        OutOfMemory: the device has no memory for one of them.
        DeviceLost: the GPU does no further work for this process.
    """
    running, failed = [], {}
    model.apply(space.setting(space.full, blocks))
    for request in requests:
        sample_id = request.sample.sample_id
        try:
            with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                run_staged(model, model.to_device(request.prepared[tier_of(space.full)].inputs), 1)
        except SampleError as error:
            failed[sample_id] = str(error)
        else:
            running.append(request)
    return running, failed


def warm_up(
    model: StagedModel, space: KnobSpace, blocks: BlockChoice, requests: Sequence[LiveRequest], max_new_tokens: int
) -> int:
    """Run every tiling of the requests once, at all knobs' highest values; returns the number of runs."""
    seen: set[Hashable] = set()
    model.apply(space.setting(space.full, blocks))
    for request in requests:
        for prepared in request.prepared.values():
            layout = prepared.shape.layout
            if layout not in seen:
                seen.add(layout)
                inputs = model.to_device(prepared.inputs)
                model.warm_up(inputs, max_new_tokens)
                with failure_named(f"sample {request.sample.sample_id}", model.describe):
                    run_staged(model, inputs, max_new_tokens)
    return len(seen)


def run_live(
    controllers: Sequence[Controller],
    model: StagedModel,
    metric: Metric,
    requests: Sequence[LiveRequest],
    budgets_s: Sequence[float],
    seed: int,
) -> list[Outcomes]:
    """The outcomes of every controller on every request at every budget, measured with batch 1, one after the other.

    Controllers take turns at each request, in an order drawn anew, so that a machine that grows slower or faster does
    so for all of them. The answers of a controller at a budget are scored together: `cider_score` takes its document
    frequencies from the references of these requests. What was in force before comes back.
    """
    generator = np.random.default_rng(seed)
    answers: list[list[list[AdaptiveAnswer]]] = [[[] for _ in budgets_s] for _ in controllers]
    with model.restored_afterwards():
        for request in requests:
            for at, budget_s in enumerate(budgets_s):
                for turn in generator.permutation(len(controllers)):
                    answers[turn][at].append(controllers[turn].answer(request, budget_s))
    return [
        Outcomes(
            name=controller.name,
            choices=tuple(tuple(answer.choice for answer in row) for row in own),
            scores=np.stack([_scores(model, metric, requests, [answer.token_ids for answer in row]) for row in own]),
            latency_s=np.array([[answer.latency_s for answer in row] for row in own]),
            overhead_s=np.array([[answer.overhead_s for answer in row] for row in own]),
        )
        for controller, own in zip(controllers, answers, strict=True)
    ]


def scores_of_choices(
    model: StagedModel,
    metric: Metric,
    requests: Sequence[LiveRequest],
    choices: Sequence[Setting],
    space: KnobSpace,
    blocks: BlockChoice,
    max_new_tokens: int,
    max_batch_size: int,
) -> np.ndarray:
    """Scores [N] of requests at choices of their own, answered in batches of the same choice and never timed.

    For accuracy on more requests than can be measured one by one; see `sweep.batches`.
    """
    questions = [
        PreparedQuestion(request.prepared[tier_of(space.check(choice))], space.setting(choice, blocks))
        for request, choice in zip(requests, choices, strict=True)
    ]
    return _scores(model, metric, requests, answer_prepared(model, questions, max_new_tokens, max_batch_size))


def _scores(
    model: StagedModel, metric: Metric, requests: Sequence[LiveRequest], token_ids: Sequence[tuple[int, ...]]
) -> np.ndarray:
    is_open = model.ends.is_thinking_open
    answers: list[Answer] = [
        answer_to(request.sample, model.decode_text(ids), is_open)
        for request, ids in zip(requests, token_ids, strict=True)
    ]
    return np.array([score.value for score in metric.score(answers).scores], dtype=float)


def requests_of(requests: Sequence[LiveRequest], metric: Metric) -> AnsweredRequests:
    """The requests in the form that `outcomes.py` takes."""
    return AnsweredRequests(
        tasks=tuple(request.features.task for request in requests),
        pictures=tuple(request.sample.image_id for request in requests),
        best=np.full(len(requests), metric.best),
    )
