"""A training run: updates of the networks, learning curves, and checkpoints that it can resume from.

On one machine the same seed gives the same networks, up to rounding, in one go or with stops in between.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.expected import UpdateRecipe, update_expected
from experiments.controller.training.recorded_states import space_of
from experiments.controller.training.replay_environment import ReplayEnvironment, RewardRecipe
from experiments.controller.training.tensor_file import FileKind, read_tensor_file, write_tensor_file

CHECKPOINT = "checkpoint.pt"
TRAINING = FileKind("controller_training", 1, CHECKPOINT)
# What a training began from; of one that began from a checkpoint see `start_of`.
DRAWN: Mapping[str, Any] = {"kind": "drawn"}


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that determines the result, except for the environment."""

    recipe: UpdateRecipe
    reward: RewardRecipe
    updates: int
    seed: int  #: of the initial weights and of the requests that are drawn
    warm_start_steps: int = 0  #: steps of `warm_start` before the first update; 0 for none

    def __post_init__(self) -> None:
        check_within("--updates", self.updates, 1, MOST_TIMES)


class TrainingRun:
    """A training.

    Args:
        networks: as they are to start; trained in place.
        start: where they are from, by `start_of`; kept in the checkpoint.
    """

    def __init__(
        self,
        networks: TwoStageNetworks,
        environment: ReplayEnvironment,
        plan: TrainingPlan,
        start: Mapping[str, Any] = DRAWN,
    ) -> None:
        self.networks = networks
        self.environment = environment
        self.plan = plan
        self._start = start
        # The states were recorded with its token.
        networks.budget.encode.requires_grad_(False)
        self._reference = copy.deepcopy(networks).requires_grad_(False)
        trained = [each for each in networks.parameters() if each.requires_grad]
        self._optimiser = torch.optim.Adam(trained, lr=plan.recipe.learning_rate)
        self._generator = torch.Generator().manual_seed(plan.seed)
        #: one for each update done: `update`, and what `update_expected` returns
        self.rows: list[dict[str, float]] = []

    @property
    def is_finished(self) -> bool:
        """Whether all updates are done."""
        return len(self.rows) >= self.plan.updates

    def step(self) -> dict[str, float]:
        """Run one update; returns its row."""
        plan, done = self.plan, len(self.rows)
        budgeted = self.environment.draw(plan.recipe.asks_per_update, self._generator)
        found = update_expected(
            self.networks, self._reference, self._optimiser, self.environment, budgeted, plan.reward, plan.recipe,
            entropy_weight=plan.recipe.entropy_weight * (1.0 - done / plan.updates),
        )  # fmt: skip
        self.rows.append({"update": done + 1, **found})
        return self.rows[-1]

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all; raises ResultsNotSaved where the disk does not take it."""
        content = {
            "plan": asdict(self.plan),
            "environment": dict(self.environment.described),
            "start": self._start,
            "space": asdict(self.environment.space),
            "hidden_size": self.networks.hidden_size,
            "networks": self.networks.state_dict(),
            "reference": self._reference.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "generator": self._generator.get_state(),
            "rows": self.rows,
        }
        write_tensor_file(path, TRAINING, content)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of this very training.

        Raises:
            ConfigurationError: it is of another plan or environment.
            ResultsError: it is not a checkpoint.
        """
        with read_tensor_file(path, TRAINING) as content:
            for name, own in (("plan", asdict(self.plan)), ("environment", dict(self.environment.described))):
                if (stored := content[name]) != own:
                    differing = sorted(key for key in own if stored.get(key) != own[key]) or sorted(stored)
                    raise ConfigurationError(
                        f"{path} is of a training with another {name} ({', '.join(differing)}); give the same flags, "
                        "or another --controller_dir"
                    )
            self.networks.load_state_dict(content["networks"])
            self._reference.load_state_dict(content["reference"])
            self._optimiser.load_state_dict(content["optimiser"])
            self._generator.set_state(content["generator"])
            self._start = content["start"]
            self.rows = content["rows"]


def stored_environment(path: Path) -> Mapping[str, Any] | None:
    """The environment's description in a checkpoint; None without a file, ResultsError for any other file."""
    if not path.exists():
        return None
    with read_tensor_file(path, TRAINING) as content:
        environment: Mapping[str, Any] = content["environment"]
    return environment


def start_of(init_from: Path | None) -> Mapping[str, Any]:
    """The start of a training, for its checkpoints: that its networks were drawn, or what the checkpoint that they are
    from records of its environment and of its own start.

    Raises:
        ResultsError: the file is not a checkpoint.
    """
    if init_from is None:
        return DRAWN
    with read_tensor_file(init_from, TRAINING) as content:
        return {"kind": "checkpoint", "environment": content["environment"], "start": content["start"]}


def earlier_trainings(path: Path) -> list[Mapping[str, Any]]:
    """All trainings' environments, the last first; raises ResultsError for a file that is not a checkpoint."""
    with read_tensor_file(path, TRAINING) as content:
        found, start = [content["environment"]], content["start"]
        while start["kind"] == "checkpoint":
            found.append(start["environment"])
            start = start["start"]
    return found


def load_networks(path: Path) -> TwoStageNetworks:
    """The networks of a checkpoint, on the host; raises ResultsError for any other file."""
    with read_tensor_file(path, TRAINING) as content:
        networks = TwoStageNetworks(space_of(content["space"]), content["hidden_size"], 1.0, seed=0)
        networks.load_state_dict(content["networks"])
    return networks
