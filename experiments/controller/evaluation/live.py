"""A live evaluation: a model and samples by the profiler's flags, and policies measured on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.b_model_loader import find_requested_checkpoint
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.f_experiment_info import describe_hardware
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.meters.host_facts import RECORDED_PACKAGES, command_line, package_version
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.pausable import can_pause
from experiment_core_utils.planning.plan import chosen_blocks, max_new_tokens_of
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.requests.drawing import draw_other_samples, open_task, with_task_named
from experiment_core_utils.requests.fitting import refuse_picture_tasks
from experiment_core_utils.tasks.interface import Metric, Task
from experiment_core_utils.tasks.registry import get_metric
from experiment_core_utils.tasks.sampling import choose_latency_ids
from experiments.analyses.charts.style import joined_caption, tasks_named
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.evaluation.outcomes import AnsweredRequests
from experiments.controller.knob_choices import KnobSpace, published_space
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.policies.feedback import FeedbackPolicy
from experiments.controller.policies.interface import Policy
from experiments.controller.policies.learned import TwoStageController
from experiments.controller.provenance import live_leaks, refuse_other_controller, refuse_other_model
from experiments.controller.running.live import (
    ChosenBefore,
    Controller,
    LiveRequest,
    prepare_requests,
    requests_of,
    requests_that_run,
    scores_of_choices,
    warm_up,
)
from experiments.controller.training.run import load_networks


@dataclass(frozen=True)
class LiveJob:
    """A live evaluation that is loaded, prepared and warmed up."""

    config: ProfilingConfig
    policies: tuple[Policy, ...]
    model: StagedModel
    task: Task
    metric: Metric
    space: KnobSpace
    blocks: BlockChoice
    max_new_tokens: int
    requests: tuple[LiveRequest, ...]  #: all that can be used; the others are in `failed`, with why
    measured: tuple[LiveRequest, ...]  #: those of them that are run one by one
    failed: dict[int, str]
    num_warm_ups: int  #: unmeasured runs, one for each tiling
    source: dict[str, Any]

    @property
    def evaluated(self) -> AnsweredRequests:
        """The measured requests in the form that `outcomes.py` takes."""
        return requests_of(self.measured, self.metric)

    @property
    def caption(self) -> str:
        """The caption at the foot of a figure of what was measured."""
        hardware, model = self.source["hardware"], self.source["model"]
        return joined_caption(
            [
                hardware["gpu_name"] or hardware["cpu"] or "CPU",
                Path(model["name"]).name,
                f"{model['dtype']}, {model['execution']}",
                f"n = {counted(len(self.measured), 'request')}, measured live",
                tasks_named([self.task.name]),
            ]
        )


def open_live(
    flags: Sequence[str], policies: Sequence[Policy], grid: MeasuredGrid, learned: Path | None = None
) -> LiveJob:
    """Parse and load, prepare every sample at every tier, and warm up.

    Args:
        grid: that the policies are based on.
        learned: the checkpoint of a two-stage controller that is to run, too.

    Raises:
        ConfigurationError: flags, task or model do not allow it, no sample can be used, or grid or checkpoint are of
            another model.
        ResultsError: the file is not a checkpoint.
    """
    config = parse_config(flags)
    source = find_requested_checkpoint(config)
    refuse_other_model(grid, source.name, "the answers are", "give the grid's as --model_path, or a grid of this one")
    if learned is not None:
        if not source.can_pause:
            raise ConfigurationError(
                f"--learned pauses inside MolmoE, and {source.name} is not a MolmoE model; drop it"
            )
        refuse_other_controller(learned, config.model, source)
    space = published_space(source.limits)
    named = with_task_named(config.task, takes_pictures=source.takes_pictures)
    refuse_picture_tasks((named.dataset_name,), named, takes_pictures=source.takes_pictures, model=source.name)
    task = open_task(named, has_chat_template=source.has_chat_template, model_type=source.model_type)
    blocks = chosen_blocks(config, source)
    drawn = draw_other_samples(task, config.task, blocks)
    device = choose_device(config.machine.device, 0)
    set_cpu_threads(config.machine.num_threads, 1)
    model = source.load(config.model, device)
    limit = max_new_tokens_of(config.task, task)
    prepared, failed = prepare_requests(model, task, drawn.sample_ids, space.tiers)
    requests, refused = requests_that_run(model, space, blocks, prepared)
    failed |= refused
    chosen = choose_latency_ids(
        [request.sample.sample_id for request in requests], config.measuring.num_latency_samples, config.task.seed
    )
    measured = tuple(each for each in requests if each.sample.sample_id in chosen)
    if not measured:
        raise ConfigurationError(
            f"none of {counted(len(drawn), 'sample')} can be measured; give others, or --num_latency_samples"
        )
    num_warm_ups = warm_up(model, space, blocks, measured, limit)
    described = {
        "command": command_line(),
        "model": {"name": source.name, "revision": source.revision, **model.describe()},
        "task": {"name": task.name, "split": task.split, "metric": task.metric, "source": dict(task.source)},
        "device": str(device),
        "hardware": describe_hardware(device).content(),
        "versions": {name: package_version(name) for name in RECORDED_PACKAGES},
        "max_new_tokens": limit,
        "sample_ids": [each.sample.sample_id for each in measured],
    }
    return LiveJob(
        config, tuple(policies), model, task, get_metric(task.metric), space, blocks, limit, tuple(requests), measured,
        failed, num_warm_ups, described,
    )  # fmt: skip


def controllers_of(job: LiveJob, learned: Path | None) -> list[Controller]:
    """The controllers of the job's policies, and the two-stage controller of a checkpoint, warmed up.

    Args:
        learned: as `open_live` had it, which refuses one that does not fit the model.

    Raises:
        ResultsError: the file is not a checkpoint.
    """
    controllers: list[Controller] = [
        ChosenBefore(policy, job.model, job.space, job.blocks, job.max_new_tokens) for policy in job.policies
    ]
    if learned is None:
        return controllers
    networks = load_networks(learned)
    assert can_pause(job.model)
    logits = ActionLogits.for_model(job.model, networks)
    two_stage = TwoStageController(logits, networks.space, job.model, job.blocks, job.max_new_tokens)
    two_stage.warm_up(job.measured)
    return [*controllers, two_stage]


def grouped_accuracy(job: LiveJob, budgets_s: Sequence[float]) -> dict[str, Any] | None:
    """Accuracy on all requests, answered in batches of the same choice; None where all were measured anyway.

    The mean of score / best score over the `num_scored` requests that have a score, for each policy of the job at each
    budget. A two-stage controller is none of these: it chooses inside a run of one request. Nor is a policy with
    feedback, which chooses by the times of single requests.
    """
    if len(job.requests) == len(job.measured):
        return None
    content: dict[str, Any] = {"num_requests": len(job.requests), "policies": {}}
    for policy in job.policies:
        if isinstance(policy, FeedbackPolicy):
            continue
        values = []
        for budget_s in budgets_s:
            choices = [policy.choose(request.features, budget_s) for request in job.requests]
            scores = scores_of_choices(
                job.model, job.metric, job.requests, choices, job.space, job.blocks, job.max_new_tokens,
                job.config.measuring.accuracy_batch_size,
            )  # fmt: skip
            known = scores[np.isfinite(scores)] / job.metric.best
            values.append(
                {"budget_ms": 1000 * budget_s, "accuracy": float(known.mean()) if len(known) else None,
                 "num_scored": len(known)}
            )  # fmt: skip
        content["policies"][policy.name] = values
    return content


def live_caveats(job: LiveJob, learned: Path | None) -> list[ControllerCaveat]:
    """Caveats of a live evaluation."""
    caveat = ControllerCaveat.of
    notes = [caveat("prepared_beforehand"), caveat("shared_warm_up", num_runs=job.num_warm_ups)]
    if learned is not None:
        ids = [each.sample.sample_id for each in job.measured]
        if job.config.model.random_weights:
            notes.append(caveat("random_weights"))
        notes += live_leaks(learned, job.task, ids)
    return [*notes, *(caveat("sample_left_out", sample_id=at, reason=why) for at, why in job.failed.items())]
