"""A MolmoE model loaded by the profiler's flags, with its block choice and networks that fit it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.models.pausable import PausableModel, can_pause
from experiment_core_utils.models.source import CheckpointSource
from experiment_core_utils.planning.plan import chosen_blocks
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.two_stage import TwoStageNetworks, action_space
from experiments.controller.provenance import refuse_misfit, refuse_other_controller
from experiments.controller.training.run import load_networks


@dataclass(frozen=True)
class LoadedModel:
    """A loaded MolmoE with its block choice."""

    config: ProfilingConfig
    source: CheckpointSource
    model: PausableModel
    blocks: BlockChoice

    @property
    def described(self) -> dict[str, str]:
        """Name and digest of the weights; random ones have none."""
        if self.config.model.random_weights:
            return {"name": self.source.name}
        return {"name": self.source.name, "weights_sha256": self.source.weights_sha256}

    def networks(self, knobs: KnobSpace, seed: int, init_from: Path | None) -> TwoStageNetworks:
        """New networks for these knobs, or those of a checkpoint; on the model's device.

        Raises:
            ConfigurationError: the checkpoint is of networks for a model of other sizes.
        """
        if init_from is None:
            embeddings = self.model.input_embeddings
            rms = float(embeddings.float().pow(2).mean().sqrt())
            space = action_space(knobs, self.blocks)
            return TwoStageNetworks(space, embeddings.shape[1], rms, seed).to(self.model.device)
        networks = load_networks(init_from)
        refuse_misfit(init_from, networks, self.source)
        return networks.to(self.model.device)


def load_model(rest: Sequence[str], controller: Path | None = None) -> LoadedModel:
    """Load the model by the profiler's flags.

    Args:
        controller: a checkpoint that is to steer it.

    Raises:
        ConfigurationError: it is not a MolmoE, or not the one that the controller was trained with.
    """
    config = parse_config(rest)
    source = find_molmoe(config.model.model_path, config.task.hf_cache_dir)
    if controller is not None:
        refuse_other_controller(controller, config.model, source)
    set_cpu_threads(config.machine.num_threads, 1)
    model = source.load(config.model, choose_device(config.machine.device))
    assert can_pause(model)
    return LoadedModel(config, source, model, chosen_blocks(config, source))


def find_molmoe(model_path: str, hf_cache_dir: Path | None) -> CheckpointSource:
    """The checkpoint of a MolmoE, without reading weights; raises ConfigurationError for another model."""
    source = find_model(model_path, hf_cache_dir)
    if not source.can_pause:
        raise ConfigurationError(
            f"{model_path} is not a MolmoE model; the two-stage controller pauses inside MolmoE only"
        )
    return source
