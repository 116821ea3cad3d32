"""In: what a grid, states or a checkpoint say they were made with, and what is used with them; out: refusals, caveats.

Models are told apart by the digests of their weights where both are known, else by the last part of their names.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiment_core_utils.b_model_loader import ModelSource
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.models.common.checkpoint_files import weights_digest
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import MeasuredGrid
from experiments.controller.training_run import load_networks, stored_environment
from experiments.controller.two_stage_networks import TwoStageNetworks

_KNOBS = {
    "tiers": "tiers",
    "top_ks": "top-k",
    "block_counts": "numbers of blocks",
    "num_total_blocks": "blocks in the model",
    "first_top_k": "experts per token in its first block",
}


def refuse_other_model(grid: MeasuredGrid, name: str, what: str, advice: str) -> None:
    """Names alone, since a grid keeps no digest; nothing is refused where it keeps no name either.

    Args:
        what: is of the model `name`, for the message.

    Raises:
        ConfigurationError: the grid is of another model.
    """
    if grid.model is not None and Path(grid.model).name != Path(name).name:
        raise ConfigurationError(f"the grid is of the model {grid.model}, and {what} of {name}; {advice}")


def refuse_other_source(
    grid: MeasuredGrid, splits: Mapping[str, str], model_name: str, states: Path | None = None
) -> None:
    """What a grid was measured with has to be what its states are recorded with.

    Args:
        splits: task -> the split that states are of; tasks that either side does not name are not looked at.
        states: the file that they are in; None where they are still to be recorded.

    Raises:
        ConfigurationError: they are not the same.
    """
    for task, split in grid.splits.items():
        if splits.get(task, split) != split:
            found, advice = ("read now", f"--split {split}") if states is None else (f"in {states}", "states of it")
            raise ConfigurationError(
                f"the grid is of the split {split} of {task}, and {splits[task]} is {found}; give {advice}"
            )
    advice = "give the grid's as --model_path" if states is None else f"give other --states than {states}"
    refuse_other_model(grid, model_name, "the states", advice)


def split_caveats(grid: MeasuredGrid, splits: Mapping[str, str] | None) -> list[str]:
    """That states do not say of which split they are, None, as those that were recorded before splits were kept."""
    if splits is not None:
        return []
    of = ", ".join(f"{split} of {task}" for task, split in grid.splits.items()) or "not known either"
    return [f"of which splits the states are is not known; the grid's samples are of these: {of}"]


def task_caveats(grid: MeasuredGrid, task: str, split: str) -> list[str]:
    """That a live evaluation asks what the grid behind its lookup, budgets and static settings was not asked."""
    if task not in grid.metrics:
        return [f"the grid is of {', '.join(grid.metrics)}, and {task} was measured"]
    known = grid.splits.get(task, split)
    return [f"the grid is of the split {known} of {task}, and {split} was measured"] * (known != split)


def refuse_misfit(path: Path, networks: TwoStageNetworks, source: ModelSource) -> None:
    """Whatever the networks choose has to be possible in the model, a MolmoE, and its states have to fit in.

    Args:
        path: the checkpoint, for the message.

    Raises:
        ConfigurationError: it is not, or they do not.
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


def refuse_other_controller(path: Path, config: ProfilingConfig, source: ModelSource) -> None:
    """A checkpoint against the model that it is to steer; reads the model's weights files where it names their digest.

    Random weights have no digest: then sizes alone are compared.

    Raises:
        ConfigurationError: it was trained with another model.
        ResultsError: the file is not a checkpoint.
    """
    refuse_misfit(path, load_networks(path), source)
    made_with = model_of(stored_environment(path))
    if config.model.random_weights or "weights_sha256" not in made_with:
        return
    if weights_digest(source.folder) != made_with["weights_sha256"]:
        raise ConfigurationError(
            f"{path} was trained with other weights, those of {made_with['name']}, than {source.name} has; give that "
            "model as --model_path, or train anew"
        )


def refuse_other_weights(path: Path, states: Path, of_states: Mapping[str, str]) -> None:
    """A checkpoint against the states that it is used with.

    Raises:
        ConfigurationError: they are of other weights.
    """
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
    """Name and digest as a checkpoint's environment noted them; nothing of one without a model."""
    made_with: Mapping[str, str] = (environment or {}).get("model", {})
    return made_with


def knob_differences(found: KnobSpace, wanted: KnobSpace) -> str:
    """Which knobs differ and how; empty where none does."""
    own, other = asdict(found), asdict(wanted)
    return "; ".join(
        f"{name} {_listed(own[key])} in place of {_listed(other[key])}"
        for key, name in _KNOBS.items()
        if own[key] != other[key]
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
