"""A training run: updates of the networks, learning curves, and checkpoints that it can resume from.

On one machine the same seed gives the same networks, up to rounding, in one go or with stops in between.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_TIMES, check_within
from experiments.controller.networks.two_stage import TwoStageNetworks
from experiments.controller.training.environment import RewardRecipe, rewards
from experiments.controller.training.expected import update_expected
from experiments.controller.training.grpo import GrpoRecipe, update
from experiments.controller.training.recorded_states import space_of
from experiments.controller.training.tabled_environment import TabledEnvironment
from experiments.controller.training.tensor_file import FileKind, read_tensor_file, write_tensor_file

CHECKPOINT = "checkpoint.pt"
TRAINING = FileKind("controller_training", 1, CHECKPOINT)
# What a training began from; of one that began from a checkpoint see `start_of`.
DRAWN: Mapping[str, Any] = {"kind": "drawn"}


Objective = Literal["expected", "grpo"]


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that determines the result, except for the environment."""

    grpo: GrpoRecipe
    reward: RewardRecipe
    updates: int
    seed: int  #: of the initial weights, of requests and of draws
    warm_start: Mapping[str, Any] | None = None  #: how the networks were taught before; None for not at all
    objective: Objective = "grpo"

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
        environment: TabledEnvironment,
        plan: TrainingPlan,
        start: Mapping[str, Any] = DRAWN,
    ) -> None:
        self.networks = networks
        self.environment = environment
        self.plan = plan
        self._start: Mapping[str, Any] | None = start
        networks.budget.encode.requires_grad_(not environment.budget_token_is_fixed)
        self._reference = copy.deepcopy(networks).requires_grad_(False)
        trained = [each for each in networks.parameters() if each.requires_grad]
        self._optimiser = torch.optim.Adam(trained, lr=plan.grpo.learning_rate)
        self._generator = torch.Generator().manual_seed(plan.seed)
        #: one for each update done: `update`, `reward`, `accuracy`, `latency_ms`, `violation_rate` (means over its
        #: roll-outs, drawn, not the likeliest), `advantage_groups` (fraction of groups whose rewards differ) and what
        #: `grpo.update` returns
        self.rows: list[dict[str, float]] = []

    @property
    def is_finished(self) -> bool:
        """Whether all updates are done."""
        return len(self.rows) >= self.plan.updates

    def step(self) -> dict[str, float]:
        """Run one update; returns its row."""
        row = self._expected_row() if self.plan.objective == "expected" else self._grpo_row()
        self.rows.append(row)
        return row

    def _expected_row(self) -> dict[str, float]:
        recipe = self.plan.grpo
        budgeted = self.environment.draw(recipe.asks_per_update * recipe.group_size, self._generator)
        found = update_expected(
            self.networks, self._reference, self._optimiser, self.environment, budgeted, self.plan.reward, recipe,
            self._entropy_weight,
        )  # fmt: skip
        return {"update": len(self.rows) + 1, **found}

    @property
    def _entropy_weight(self) -> float:
        """It falls evenly to 0."""
        return self.plan.grpo.entropy_weight * (1.0 - len(self.rows) / self.plan.updates)

    def _grpo_row(self) -> dict[str, float]:
        recipe = self.plan.grpo
        budgeted = self.environment.draw(recipe.asks_per_update, self._generator).repeated(recipe.group_size)
        rolled = self.environment.roll_out(self.networks, budgeted, self._generator)
        gained = rewards(self.plan.reward, rolled.accuracy, rolled.latency_s, budgeted.budgets_s)
        found = update(self.networks, self._reference, self._optimiser, rolled, gained, recipe, self._entropy_weight)
        groups = gained.view(-1, recipe.group_size)
        return {
            "update": len(self.rows) + 1,
            "reward": float(gained.mean()),
            "accuracy": float(rolled.accuracy.mean()),
            "latency_ms": 1000 * float(rolled.latency_s.mean()),
            "violation_rate": float((rolled.latency_s > budgeted.budgets_s).double().mean()),
            "advantage_groups": float((groups.amax(dim=1) > groups.amin(dim=1)).double().mean()),
            **found,
        }

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all; raises ResultsNotSaved where the disk does not take it."""
        content = {
            "plan": asdict(self.plan),
            "environment": self.environment.describe(),
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
            self._resume_from(content, path)

    def _resume_from(self, content: Mapping[str, Any], path: Path) -> None:
        # Plans from before objectives were kept are of GRPO.
        stored = {**content, "plan": {"objective": "grpo", **content["plan"]}}
        for name, own in (("plan", asdict(self.plan)), ("environment", self.environment.describe())):
            if stored[name] != own:
                differing = sorted(key for key in own if stored[name].get(key) != own[key]) or sorted(stored[name])
                raise ConfigurationError(
                    f"{path} is of a training with another {name} ({', '.join(differing)}); give the same flags, or "
                    "another --controller_dir"
                )
        self.networks.load_state_dict(content["networks"])
        self._reference.load_state_dict(content["reference"])
        self._optimiser.load_state_dict(content["optimiser"])
        self._generator.set_state(content["generator"])
        # None in a checkpoint from before starts were kept.
        self._start = content.get("start")
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
    from records of its environment and of its own start (None where it does not record it).

    Raises:
        ResultsError: the file is not a checkpoint.
    """
    if init_from is None:
        return DRAWN
    with read_tensor_file(init_from, TRAINING) as content:
        return {"kind": "checkpoint", "environment": content["environment"], "start": content.get("start")}


def earlier_trainings(path: Path) -> tuple[list[Mapping[str, Any]], bool]:
    """All trainings' environments, the last first, and whether these are all, which an old checkpoint does not show.

    Raises:
        ResultsError: the file is not a checkpoint.
    """
    with read_tensor_file(path, TRAINING) as content:
        found, start = [content["environment"]], content.get("start")
        while start is not None and start["kind"] == "checkpoint":
            found.append(start["environment"])
            start = start["start"]
        # A synthetic training takes no other networks to start from.
        return found, start is not None or found[-1]["kind"] == "synthetic"


def load_networks(path: Path) -> TwoStageNetworks:
    """The networks of a checkpoint, on the host; raises ResultsError for any other file."""
    with read_tensor_file(path, TRAINING) as content:
        networks = TwoStageNetworks(space_of(content["space"]), content["hidden_size"], 1.0, seed=0)
        networks.load_state_dict(content["networks"])
    return networks
