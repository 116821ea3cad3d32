"""Checks that a grid, recorded states, a checkpoint and a model fit together, as refusals and caveats.

Models are distinguished by the digests of their weights where both are known, else by the last part of their names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiment_core_utils.c_prompt_processing import fingerprint_of_ids
from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.models.source import CheckpointSource
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.interface import Task
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.recorded_states import RecordedStates
from experiments.controller.training.replay_environment import fingerprints
from experiments.controller.training.run import earlier_trainings, load_networks, stored_environment

_KNOBS = {
    "tiers": "tiers",
    "top_ks": "top-k",
    "block_counts": "numbers of blocks",
    "num_total_blocks": "blocks in the model",
    "first_top_k": "experts per token in its first block",
}


def refuse_other_model(grid: MeasuredGrid, name: str, what: str, advice: str) -> None:
    """Raises ConfigurationError for a grid of a model of another name; a grid without a name is not refused.

    Args:
        what: is of the model `name`, for the message.
    """
    if grid.model is not None and Path(grid.model).name != Path(name).name:
        raise ConfigurationError(f"the grid is of the model {grid.model}, and {what} of {name}; {advice}")


def refuse_other_source(
    grid: MeasuredGrid, splits: Mapping[str, str], model_name: str, states: Path | None = None
) -> None:
    """Raises ConfigurationError where the states are of another split or another model than the grid.

    Args:
        splits: task -> the split that states are of; tasks that either side does not name are not looked at.
        states: the file that they are in; None where they are still to be recorded.
    """
    for task, split in grid.splits.items():
        if splits.get(task, split) != split:
            found, advice = ("read now", f"--split {split}") if states is None else (f"in {states}", "states of it")
            raise ConfigurationError(
                f"the grid is of the split {split} of {task}, and {splits[task]} is {found}; give {advice}"
            )
    advice = "give the grid's as --model_path" if states is None else f"give other --states than {states}"
    refuse_other_model(grid, model_name, "the states", advice)


def task_caveats(grid: MeasuredGrid, task: str, split: str) -> list[ControllerCaveat]:
    """Caveats for a live evaluation on another task or split than that of its grid."""
    if task not in grid.metrics:
        return [ControllerCaveat.of("other_task", tasks=list(grid.metrics), task=task)]
    known = grid.splits.get(task, split)
    found = ControllerCaveat.of("other_split", split_of_grid=known, task=task, split=split)
    return [found] * (known != split)


def refuse_misfit(path: Path, networks: TwoStageNetworks, source: CheckpointSource) -> None:
    """Raises ConfigurationError unless the networks' choices are possible in the model, a MolmoE, and its states fit.

    Args:
        path: the checkpoint, for the message.
    """
    knobs, limits = networks.space.knobs, source.limits
    sizes = {
        "width": (networks.hidden_size, int(source.config.text_config.hidden_size)),
        "blocks": (knobs.num_total_blocks, limits.num_total_blocks),
        "experts per token": (knobs.first_top_k, limits.default_top_k),
    }
    misfits = [f"{name} {of} in place of {has}" for name, (of, has) in sizes.items() if of != has]
    if limits.num_experts is not None and knobs.top_ks[-1] > limits.num_experts:
        misfits.append(f"top-k up to {knobs.top_ks[-1]} of {limits.num_experts} experts")
    if misfits:
        raise ConfigurationError(
            f"{path} is for another model than {source.name}: {', '.join(misfits)}; give a checkpoint of this one's, "
            "or train anew"
        )


def refuse_other_controller(path: Path, config: ModelConfig, source: CheckpointSource) -> None:
    """Refuse a checkpoint of another model than the one to steer, by the weights' digest, or sizes for random weights.

    Raises:
        ConfigurationError: it was trained with another model.
        ResultsError: the file is not a checkpoint.
    """
    refuse_misfit(path, load_networks(path), source)
    made_with = model_of(stored_environment(path))
    if config.random_weights or "weights_sha256" not in made_with:
        return
    if source.weights_sha256 != made_with["weights_sha256"]:
        raise ConfigurationError(
            f"{path} was trained with other weights, those of {made_with['name']}, than {source.name} has; give that "
            "model as --model_path, or train anew"
        )


def refuse_other_weights(path: Path, states: Path, of_states: Mapping[str, str]) -> None:
    """Raises ConfigurationError where a checkpoint and the states that it is used with come from different weights."""
    made_with = model_of(stored_environment(path))
    if "weights_sha256" in made_with and "weights_sha256" in of_states:
        differ = made_with["weights_sha256"] != of_states["weights_sha256"]
    else:
        differ = "name" in made_with and Path(made_with["name"]).name != Path(of_states["name"]).name
    if differ:
        raise ConfigurationError(
            f"{path} was trained with other weights of the model than {states} was recorded with; give the states of "
            "its training as --states"
        )


def model_of(environment: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Name and digest of the model in a checkpoint's environment; empty for an environment without a model."""
    made_with: Mapping[str, str] = (environment or {}).get("model", {})
    return made_with


def knob_differences(found: KnobSpace, wanted: KnobSpace) -> str:
    """The knobs that differ and how; empty where none does."""
    own, other = asdict(found), asdict(wanted)
    return "; ".join(
        f"{name} {_listed(own[key])} in place of {_listed(other[key])}"
        for key, name in _KNOBS.items()
        if own[key] != other[key]
    )


def network_differences(states: RecordedStates, networks: TwoStageNetworks) -> str:
    """What of the networks differs from those that the states were recorded for; empty where nothing does."""
    found = knob_differences(states.space.knobs, networks.space.knobs)
    if not found and networks.space != states.space:
        return "pauses, or what is possible after them"
    own = networks.budget.state_dict()
    if not found and any(not own[name].cpu().equal(states.budget[name]) for name in own):
        return "the budget token"
    return found


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


LAST, BEFORE = "trained on", "started from a training on"


def live_leaks(checkpoint: Path, task: Task, sample_ids: Sequence[int]) -> list[ControllerCaveat]:
    """Caveats over all trainings of the checkpoint, for a live evaluation on these samples of the task."""
    found = enumerate(earlier_trainings(checkpoint))
    return _each_once(
        note for place, each in found for note in training_caveats(each, task, sample_ids, BEFORE if place else LAST)
    )


def training_caveats(
    trained_on: Mapping[str, Any], task: Task, sample_ids: Sequence[int], how: str = LAST
) -> list[ControllerCaveat]:
    """Caveats where a two-stage controller is evaluated on samples of one training.

    Args:
        trained_on: the training environment's description of itself. It has a digest of its samples alone, so that a
            part of them cannot be recognised.
        sample_ids: of the task, that it is evaluated on.
        how: `LAST` or `BEFORE`.
    """
    digests, splits = trained_on["samples"], trained_on["splits"]
    if task.name not in digests or splits.get(task.name, task.split) != task.split:
        return []
    if digests[task.name] in (fingerprint_of_ids(sample_ids), fingerprint_of_ids(sorted(sample_ids))):
        return [ControllerCaveat.of("trained_on_same_ids", how=how)]
    return [ControllerCaveat.of("trained_on_a_digest", how=how, task=task.name)]


def replay_leaks(checkpoint: Path, calibration: MeasuredGrid) -> list[ControllerCaveat]:
    """Caveats over all trainings of the checkpoint, for a replay.

    Args:
        calibration: those of its samples that a training could use; a training on just these has seen nothing of the
            evaluation. May be empty.
    """
    own = fingerprints(calibration)
    return _each_once(
        ControllerCaveat.of("trained_on_others", how=BEFORE if place else LAST)
        for place, described in enumerate(earlier_trainings(checkpoint))
        if described["samples"] != own
    )


def _each_once(found: Iterable[ControllerCaveat]) -> list[ControllerCaveat]:
    return list({each.sentence: each for each in found}.values())
