"""In: flags; out: the environment to train on, networks that fit it, and samples that are held out."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experiment_core_utils.b_model_loader import ModelSource, find_model, load_staged_model
from experiment_core_utils.block_choice import block_choice_of
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.fingerprint import max_new_tokens_of
from experiment_core_utils.models.checkpoint_files import weights_digest
from experiment_core_utils.models.molmoe.staged import MolmoeStagedModel
from experiment_core_utils.primitives.block_choice import BlockChoice
from experiment_core_utils.primitives.config import ProfilingConfig, parse_config
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.progress_bar import SampleLines
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import get_metric
from experiments.controller.environment import Environment
from experiments.controller.knob_choices import KnobSpace, published_space
from experiments.controller.live import prepare_requests
from experiments.controller.live_environment import LiveEnvironment, check_scored, measured_range
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.recorded_states import STATES, RecordedStates, load_states, record_states
from experiments.controller.replay import spread_budgets
from experiments.controller.replay_environment import grid_space, replay_environment, usable
from experiments.controller.synthetic_environment import synthetic_environment
from experiments.controller.tabled_environment import TabledEnvironment
from experiments.controller.training_run import CHECKPOINT, TrainingPlan, load_networks, stored_environment
from experiments.controller.two_stage_networks import TwoStageNetworks, action_space
from experiments.controller.warm_start import warm_start
from experiments.core_exp.sweep_results import load_sweep

SYNTHETIC_SAMPLES, SYNTHETIC_BUDGETS = 30, 12


@dataclass(frozen=True)
class TrainingJob:
    """Loaded and measured, before the first update.

    Attributes:
        held_out: other pictures than those trained on; None where there are no tables of any.
        caption: of the curves.
    """

    networks: TwoStageNetworks
    environment: Environment
    held_out: TabledEnvironment | None
    caption: str

    def teach(self, plan: TrainingPlan) -> list[float]:
        """The warm start that the plan asks for; its losses, none without one.

        Raises:
            ConfigurationError: there are no tables to teach from.
        """
        if plan.warm_start is None:
            return []
        if not isinstance(self.environment, TabledEnvironment):
            raise ConfigurationError("--warm_start needs tables; train on a replay first, then --init_from that")
        self.networks.budget.requires_grad_(not self.environment.budget_token_is_fixed)
        generator = torch.Generator().manual_seed(plan.seed + 1)
        return warm_start(
            self.networks,
            self.environment,
            plan.reward,
            plan.warm_start["teacher"],
            plan.warm_start["steps"],
            plan.grpo.learning_rate,
            generator,
        )


def open_job(given: argparse.Namespace, rest: Sequence[str], plan: TrainingPlan) -> TrainingJob:
    """The environment that the flags ask for.

    Raises:
        ConfigurationError, ResultsError: flags, files or model do not allow it.
    """
    if given.environment == "synthetic":
        unwanted = [
            *(["--grid"] if given.grid is not None else []),
            *(["--init_from"] if given.init_from else []),
            *rest[:1],
        ]
        if unwanted:
            raise ConfigurationError(
                f"--environment synthetic takes no grid, model or task; drop {', '.join(unwanted)}"
            )
        environment = synthetic_environment(SYNTHETIC_SAMPLES, SYNTHETIC_BUDGETS, seed=0)
        networks = TwoStageNetworks(environment.space, environment.hidden_size, 1.0, plan.seed)
        return TrainingJob(
            networks, environment, None, f"synthetic environment  ·  trained on {SYNTHETIC_SAMPLES} samples"
        )
    if (given.grid is None) == (given.environment == "replay"):
        raise ConfigurationError("--grid RESULTS goes with --environment replay, which needs it")
    return _replay(given, rest, plan) if given.environment == "replay" else _live(given, rest, plan)


@dataclass(frozen=True)
class LoadedModel:
    """A MolmoE with what chooses its blocks."""

    config: ProfilingConfig
    source: ModelSource
    model: MolmoeStagedModel
    blocks: BlockChoice

    @property
    def described(self) -> dict[str, str]:
        """Name and digest of the weights."""
        return {"name": self.source.name, "weights_sha256": weights_digest(self.source.folder)}

    def networks(self, knobs: KnobSpace, seed: int, init_from: Path | None) -> TwoStageNetworks:
        """New ones for these knobs, or those of a checkpoint; on the model's device."""
        text = self.model.model.config.text_config
        if init_from is None:
            embeddings = self.model.model.get_input_embeddings().weight
            rms = float(embeddings.detach().float().pow(2).mean().sqrt())
            space = action_space(knobs, self.blocks)
            return TwoStageNetworks(space, int(text.hidden_size), rms, seed).to(self.model.device)
        networks = load_networks(init_from)
        if networks.hidden_size != text.hidden_size:
            raise ConfigurationError(
                f"{init_from} is for a model of width {networks.hidden_size}, this one has {text.hidden_size}"
            )
        return networks.to(self.model.device)


def load_model(rest: Sequence[str]) -> LoadedModel:
    """By the profiler's flags; raises ConfigurationError for another model than MolmoE."""
    config = parse_config(rest)
    source = find_model(config.model_path, config.hf_cache_dir)
    set_cpu_threads(config.num_threads, 1)
    model = load_staged_model(config, source, choose_device(config.device))
    if not isinstance(model, MolmoeStagedModel):
        raise ConfigurationError(
            f"{config.model_path} is no MolmoE; the two-stage controller pauses inside MolmoE only"
        )
    return LoadedModel(config, source, model, block_choice_of(config, source.folder))


def _replay(given: argparse.Namespace, rest: Sequence[str], plan: TrainingPlan) -> TrainingJob:
    grid = load_grid(given.grid)
    train_part, held_part = split_by_picture(grid, given.calibration_share, given.split_seed)
    path = given.states or given.controller_dir / STATES.usual_name
    config = parse_config(rest)
    if path.exists():
        states = load_states(path)
        if len(states.budgets_s) != given.num_budgets:
            raise ConfigurationError(
                f"{path} holds states for {len(states.budgets_s)} budgets, and --num_budgets is {given.num_budgets}; "
                f"give --num_budgets {len(states.budgets_s)}, or another file of --states"
            )
        refuse_other_source(given.grid, {}, states.model["name"])
        networks = _networks_of(states, plan.seed, given.init_from)
    else:
        tasks = {name: open_task(replace(config, dataset_name=name)) for name in dict.fromkeys(grid.tasks)}
        source = find_model(config.model_path, config.hf_cache_dir)
        refuse_other_source(given.grid, {name: task.split for name, task in tasks.items()}, source.name)
        asked = [(tasks[name], at) for name, at in zip(grid.tasks, grid.sample_ids, strict=True)]
        states, networks = _record(given, rest, plan, asked, train_part)
        states.save(path)
    environment = replay_environment(train_part, states)
    held_out = replay_environment(held_part, states)
    # Updates on tables are small: the host is fastest.
    caption = f"trained on a replay of:  {usable(train_part, states).caption}"
    return TrainingJob(networks.cpu(), environment, held_out, caption)


def refuse_other_source(paths: Sequence[Path], splits: Mapping[str, str], model_name: str) -> None:
    """What a grid was measured with has to be what its states are recorded with.

    A table of many runs does not say it, and models are told apart by the last part of their names alone.

    Args:
        splits: task -> the split that is read now; those of other tasks are not looked at.

    Raises:
        ConfigurationError: they are not the same.
    """
    if any(path.is_file() for path in paths):
        return
    for setting in load_sweep(*paths).settings:
        made = setting.result["provenance"]
        task, split, name = made["task"]["name"], made["task"]["split"], made["model"]["name"]
        if splits.get(task, split) != split:
            raise ConfigurationError(
                f"the grid is of the split {split} of {task}, and {splits[task]} is read now; give --split {split}"
            )
        if Path(name).name != Path(model_name).name:
            raise ConfigurationError(
                f"the grid is of the model {name}, and the states of {model_name}; give the grid's as --model_path"
            )


def _record(
    given: argparse.Namespace,
    rest: Sequence[str],
    plan: TrainingPlan,
    asked: Sequence[tuple[Task, int]],
    train_part: MeasuredGrid,
) -> tuple[RecordedStates, TwoStageNetworks]:
    loaded = load_model(rest)
    total, own = loaded.model.num_total_blocks, loaded.model.default_top_k
    networks = loaded.networks(grid_space(train_part, total, own), plan.seed, given.init_from)
    budgets_s = spread_budgets(train_part.complete(), given.num_budgets)
    progress = SampleLines("recording states", len(asked))
    return record_states(loaded.model, asked, networks, budgets_s, loaded.described, progress), networks


def _networks_of(states: RecordedStates, seed: int, init_from: Path | None) -> TwoStageNetworks:
    """Networks with the budget token of the states."""
    if init_from is None:
        networks = TwoStageNetworks(states.space, states.prompts.shape[1], 1.0, seed)
        networks.budget.load_state_dict(dict(states.budget))
        return networks
    networks = load_networks(init_from)
    own = networks.budget.state_dict()
    if networks.space != states.space or any(not torch.equal(own[name], states.budget[name]) for name in own):
        raise ConfigurationError(f"the states were recorded with another budget token or space than {init_from} has")
    return networks


def _live(given: argparse.Namespace, rest: Sequence[str], plan: TrainingPlan) -> TrainingJob:
    loaded = load_model(rest)
    config, model = loaded.config, loaded.model
    networks = loaded.networks(published_space(loaded.source.limits), plan.seed, given.init_from)
    space, task = networks.space, open_task(config)
    requests, failed = prepare_requests(model, task, draw_samples(task, config).sample_ids, space.knobs.tiers)
    if not requests:
        raise ConfigurationError(f"none of {len(failed)} samples can be used; give others")
    metric = get_metric(task.metric)
    # Before the budgets are measured.
    check_scored(metric, requests)
    limit = max_new_tokens_of(config, task)
    # A training that goes on is asked at the budgets that it began with.
    went = stored_environment(given.controller_dir / CHECKPOINT) if given.resume else None
    if went is not None and went["kind"] == "live":
        budgets_ms = went["budgets_ms"]
    else:
        budgets_ms = [1000 * each for each in measured_range(model, requests, space, loaded.blocks, limit)]
    low_ms, high_ms = budgets_ms
    described = {
        "kind": "live",
        "task": task.name,
        "split": task.split,
        "sample_ids": [each.sample.sample_id for each in requests],
        "model": loaded.described,
        "device": str(model.device),
        "max_new_tokens": limit,
        "budgets_ms": [low_ms, high_ms],
    }
    range_s = low_ms / 1000, high_ms / 1000
    environment = LiveEnvironment(model, metric, requests, space, loaded.blocks, limit, range_s, described)
    return TrainingJob(
        networks, environment, None, f"live: {loaded.source.name}, {task.name}, trained on {len(requests)} samples"
    )
