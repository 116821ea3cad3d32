"""In: a frozen model, samples, budgets; out: what both stages would see of each sample, as a file.

The states behind the pauses hold for the budget token that they were recorded with, so that token is in the file, and a
training on them leaves it as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.models.molmoe.split_prefill import trace_prefill
from experiment_core_utils.models.molmoe.staged import MolmoeStagedModel
from experiment_core_utils.primitives.errors import ResultsError, SampleError
from experiment_core_utils.primitives.knobs import tier_target
from experiment_core_utils.tasks.interface import Sample, Task
from experiments.controller.adaptive_generation import prompt_ids
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.stage_odds import mean_embedding
from experiments.controller.tensor_file import FileKind, read_tensor_file, write_tensor_file
from experiments.controller.two_stage_networks import ActionSpace, TwoStageNetworks

STATES = FileKind("controller_states", 1, "states.pt")


@dataclass(frozen=True)
class RecordedStates:
    """S samples, T tiers, P pauses, L budgets; all on the host in float32.

    Attributes:
        keys: (task, sample id) of each sample.
        prompts: [S, H].
        last: [S, T, P, H], the prompt's last token.
        tokens: [S, T, P, L, H], the budget token.
        budgets_s: [L], float64.
        budget: weights of the `BudgetToken`.
        failed: "task id" -> why it could not be used.
        model: name and digest, so that states of other weights are told apart.
    """

    keys: tuple[tuple[str, int], ...]
    prompts: torch.Tensor
    last: torch.Tensor
    tokens: torch.Tensor
    budgets_s: torch.Tensor
    space: ActionSpace
    budget: Mapping[str, torch.Tensor]
    failed: Mapping[str, str]
    model: Mapping[str, str]

    def save(self, path: Path) -> None:
        """Raises ResultsNotSaved where the disk does not take it."""
        content = {name: getattr(self, name) for name in vars(self) if name != "space"}
        write_tensor_file(path, STATES, {**content, "space": asdict(self.space)})


def load_states(path: Path) -> RecordedStates:
    """What `RecordedStates.save` wrote; raises ResultsError for anything else."""
    content = read_tensor_file(path, STATES)
    return RecordedStates(**{**content, "space": space_of(content["space"])})


def space_of(content: Mapping[str, Any]) -> ActionSpace:
    """The action space that `asdict` made a mapping of; raises ResultsError for anything else."""
    try:
        return ActionSpace(**{**content, "knobs": KnobSpace(**content["knobs"])})
    except (KeyError, TypeError) as error:
        raise ResultsError(f"this is no action space of a controller ({error}); train it again") from error


@torch.no_grad()
def record_states(
    model: MolmoeStagedModel,
    asked: Sequence[tuple[Task, int]],
    networks: TwoStageNetworks,
    budgets_s: Sequence[float],
    source: Mapping[str, str],
) -> RecordedStates:
    """Run vision and the first blocks of every sample at every tier once.

    Args:
        asked: task and sample id.
        networks: their budget token is recorded; on the model's device.

    Raises:
        ResultsError: no sample could be used.
    """
    budgets = torch.tensor(budgets_s, dtype=torch.float64)
    rows = networks.budget_token(budgets)
    found, failed = {}, {}
    with model.kept():
        for task, sample_id in asked:
            try:
                sample = task[sample_id]
                found[task.name, sample_id] = _states(model, task, sample, networks.space, rows)
            except SampleError as error:
                failed[f"{task.name} {sample_id}"] = str(error)
    if not found:
        raise ResultsError(f"none of {len(asked)} samples could be used: {next(iter(failed.values()), 'none given')}")
    prompts, last, tokens = (torch.stack(column) for column in zip(*found.values(), strict=True))
    weights = {name: tensor.cpu() for name, tensor in networks.budget.state_dict().items()}
    return RecordedStates(tuple(found), prompts, last, tokens, budgets, networks.space, weights, failed, dict(source))


def _states(
    model: MolmoeStagedModel, task: Task, sample: Sample, space: ActionSpace, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompt [H], last [T, P, H] and tokens [T, P, L, H] of one sample."""
    prompt = task.prompt(sample)
    last, tokens = [], []
    places = torch.tensor(space.pauses) - 1
    for tier in space.knobs.tiers:
        inputs = model.to_device(model.prepare(sample, prompt, tier_target(tier).crops).inputs)
        features = model.encode_image(inputs)
        traced = trace_prefill(model.model, inputs["input_ids"], features, space.pauses[-1], rows)
        last.append(traced.last.float().cpu()[places])
        tokens.append(traced.appended.float().cpu()[places])
    return mean_embedding(model.host_embeddings, prompt_ids(model, prompt)), torch.stack(last), torch.stack(tokens)
