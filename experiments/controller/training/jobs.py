"""The replay that training flags request, networks that fit it, and samples that are held out."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.progress import sample_lines
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.requests.drawing import open_tasks
from experiments.analyses.knobs.conclusion import invalid_lines
from experiments.controller.evaluation.replay import spread_budgets
from experiments.controller.measured_grid import MeasuredGrid, load_grid, split_by_picture
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.provenance import (
    knob_differences,
    network_differences,
    refuse_other_model,
    refuse_other_source,
    refuse_other_weights,
)
from experiments.controller.running.loaded_molmoe import find_molmoe, load_model
from experiments.controller.training.expected import warm_start
from experiments.controller.training.recorded_states import (
    STATES,
    RecordedStates,
    load_states,
    missing_caveats,
    record_states,
    without_states,
)
from experiments.controller.training.replay_environment import (
    ReplayEnvironment,
    grid_space,
    replay_environment,
    with_states,
)
from experiments.controller.training.run import TrainingPlan, load_networks


@dataclass(frozen=True)
class TrainingJob:
    """A training before its first update: loaded and measured."""

    networks: TwoStageNetworks
    environment: ReplayEnvironment
    held_out: ReplayEnvironment  #: of other pictures than those trained on
    caption: str  #: of the curves
    #: "task id" of each sample that was requested and is not trained or evaluated on -> why
    left_out: Mapping[str, str] = field(default_factory=dict)

    def run_warm_start(self, plan: TrainingPlan) -> list[float]:
        """Run the warm start that the plan requests; returns its losses, none without one."""
        self.networks.budget.encode.requires_grad_(False)
        generator = torch.Generator().manual_seed(plan.seed + 1)
        recipe, steps = plan.recipe, plan.warm_start_steps
        return warm_start(self.networks, self.environment, plan.reward, steps, recipe.learning_rate, generator)


def open_job(flags: argparse.Namespace, rest: Sequence[str], plan: TrainingPlan) -> TrainingJob:
    """The replay that the flags request, with its networks.

    Raises:
        ConfigurationError, ResultsError: flags, files or model do not allow it.
    """
    whole = load_grid(flags.grid)
    grid = whole.with_all_knobs()
    train_part, held_part = split_by_picture(grid, flags.calibration_share, flags.split_seed)
    path = flags.states or flags.controller_dir / STATES.usual_name
    if path.exists():
        parse_config(rest)
        states, networks = _recorded(flags, plan, grid, path)
    else:
        states, networks = _record(flags, rest, plan, grid, train_part)
        states.save(path)
    left_out = without_states(states, grid.keys)
    said = [f"caveat: {found.sentence}" for found in [*whole.unchosen, *missing_caveats(left_out, len(grid))]]
    for line in [*invalid_lines(whole.voided_by), *said]:
        print(line, file=sys.stderr)
    environment = replay_environment(train_part, states)
    held_out = replay_environment(held_part, states)
    # Updates on tables are small: the host is fastest.
    caption = f"trained on a replay of:  {with_states(train_part.complete(), states).caption}"
    return TrainingJob(networks.cpu(), environment, held_out, caption, left_out)


def _recorded(
    flags: argparse.Namespace, plan: TrainingPlan, grid: MeasuredGrid, path: Path
) -> tuple[RecordedStates, TwoStageNetworks]:
    """The states of an existing file, and networks with their budget token."""
    states = load_states(path)
    if len(states.budgets_s) != flags.num_budgets:
        raise ConfigurationError(
            f"{path} contains states for {counted(len(states.budgets_s), 'budget')}, and --num_budgets is "
            f"{flags.num_budgets}; give --num_budgets {len(states.budgets_s)}, or another file of --states"
        )
    refuse_other_source(grid, states.splits, states.model["name"], path)
    knobs = states.space.knobs
    differing = knob_differences(knobs, grid_space(grid, knobs.num_total_blocks, knobs.first_top_k))
    if differing:
        raise ConfigurationError(
            f"{path} contains states for other knobs than the grid's ({differing}); delete it, so that they are "
            "recorded again, or give another file as --states"
        )
    if flags.init_from is None:
        networks = TwoStageNetworks(states.space, states.prompts.shape[1], 1.0, plan.seed)
        networks.budget.load_state_dict(dict(states.budget))
        return states, networks
    refuse_other_weights(flags.init_from, path, states.model)
    networks = load_networks(flags.init_from)
    if differing := network_differences(states, networks):
        raise ConfigurationError(
            f"{path} was recorded for other networks than those of {flags.init_from} ({differing}); give the states of "
            f"its training as --states, or delete {path}, so that they are recorded again"
        )
    return states, networks


def _record(
    flags: argparse.Namespace, rest: Sequence[str], plan: TrainingPlan, grid: MeasuredGrid, train_part: MeasuredGrid
) -> tuple[RecordedStates, TwoStageNetworks]:
    """Record the states; everything that can be refused is refused before weights are read."""
    config = parse_config(rest)
    source = find_molmoe(config.model.model_path, config.task.hf_cache_dir)
    limits = source.limits
    assert limits.default_top_k is not None and limits.num_total_blocks is not None
    knobs = grid_space(train_part, limits.num_total_blocks, limits.default_top_k)
    refuse_other_model(grid, source.name, "the states", "give the grid's as --model_path")
    if flags.init_from is not None:
        differing = knob_differences(load_networks(flags.init_from).space.knobs, knobs)
        if differing:
            raise ConfigurationError(
                f"{flags.init_from} chooses among other knobs than the grid has ({differing}); give a checkpoint of "
                "such a grid, or drop --init_from"
            )
    tasks = open_tasks(config.task, grid.tasks)
    refuse_other_source(grid, {name: task.split for name, task in tasks.items()}, source.name)
    sample_keys = [(tasks[name], at) for name, at in grid.keys]
    loaded = load_model(rest, flags.init_from)
    networks = loaded.networks(knobs, plan.seed, flags.init_from)
    budgets_s = spread_budgets(train_part.complete(), flags.num_budgets)
    progress = sample_lines("recording states", len(sample_keys))
    return record_states(loaded.model, sample_keys, networks, budgets_s, loaded.described, progress), networks
