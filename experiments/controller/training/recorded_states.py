"""The states that both stages would see of each sample in a frozen model, recorded to a file.

What samples of one picture have in common runs once for all of them, tier by tier.

The states at the pauses are valid for the budget token that they were recorded with, so the file contains that token,
and a training on them does not change it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.engines.paused_runner import TracedPrefill
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.models.pausable import PausableModel
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import ResultsError, SampleError, library_faults_named
from experiment_core_utils.primitives.progress import LogLines
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.tasks.content import pixel_digest
from experiment_core_utils.tasks.interface import Sample, Task
from experiments.controller.caveats import ControllerCaveat
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.networks.action_logits import mean_embedding
from experiments.controller.networks.two_stage import ActionSpace, TwoStageNetworks
from experiments.controller.training.tensor_file import FileKind, read_tensor_file, write_tensor_file

# Task and sample id.
SampleKey = tuple[str, int]


@dataclass(frozen=True)
class PictureQuestion:
    """A sample without its picture, which is read again when it is needed, since many do not fit into memory."""

    task: Task
    sample_id: int
    text: torch.Tensor  #: ids [S] of its prompt on the host, without special tokens

    @property
    def key(self) -> SampleKey:
        """The task and sample id."""
        return self.task.name, self.sample_id

    def read(self) -> Sample:
        """The whole sample; raises SampleError for an unreadable one."""
        return self.task[self.sample_id]


def questions_by_picture(
    model: PausableModel, sample_keys: Sequence[tuple[Task, int]]
) -> tuple[list[list[PictureQuestion]], dict[SampleKey, str]]:
    """Each sample once, in the order in which pictures first occur; and why samples could not be read.

    A sample without a picture is a group of its own.
    """
    by_picture: dict[str | SampleKey, list[PictureQuestion]] = {}
    failed: dict[SampleKey, str] = {}
    for task, sample_id in {(task.name, sample_id): (task, sample_id) for task, sample_id in sample_keys}.values():
        try:
            with library_faults_named(f"sample {sample_id}"):
                sample = task[sample_id]
                prompt = task.prompt(sample)
                model.check_prompt(prompt)
                question = PictureQuestion(task, sample_id, model.prompt_ids(prompt))
                picture = question.key if sample.image is None else pixel_digest(sample.image)
        except SampleError as error:
            failed[task.name, sample_id] = str(error)
            continue
        by_picture.setdefault(picture, []).append(question)
    return list(by_picture.values()), failed


# Most messages name their sample, so that there may be as many as samples.
REASONS_SHOWN = 3
STATES = FileKind("controller_states", 1, "states.pt")
# Of one sample: prompt [H], last [T, P, H] and tokens [T, P, L, H].
_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RecordedStates:
    """The states of S samples, T tiers, P pauses and L budgets, all on the host in float32."""

    keys: tuple[SampleKey, ...]
    prompts: torch.Tensor  #: [S, H]
    last: torch.Tensor  #: [S, T, P, H], the prompt's last token
    tokens: torch.Tensor  #: [S, T, P, L, H], the budget token
    budgets_s: torch.Tensor  #: [L], float64
    space: ActionSpace
    budget: Mapping[str, torch.Tensor]  #: weights of the `BudgetToken`
    failed: Mapping[str, str]  #: "task id" -> why it could not be used
    model: Mapping[str, str]  #: name and digest, so that states of other weights are distinguished
    splits: Mapping[str, str]  #: task -> the split that its samples are of

    def save(self, path: Path) -> None:
        """Write the states; raises ResultsNotSaved where the disk refuses."""
        content = {name: getattr(self, name) for name in vars(self) if name != "space"}
        write_tensor_file(path, STATES, {**content, "space": asdict(self.space)})


def load_states(path: Path) -> RecordedStates:
    """The states that `RecordedStates.save` wrote; raises ResultsError for any other file."""
    with read_tensor_file(path, STATES) as content:
        return RecordedStates(**{**content, "space": space_of(content["space"])})


def space_of(content: Mapping[str, Any]) -> ActionSpace:
    """The action space that `asdict` made a mapping of; raises ResultsError for anything else."""
    try:
        return ActionSpace(**{**content, "knobs": KnobSpace(**content["knobs"])})
    except (KeyError, TypeError) as error:
        raise ResultsError(f"this is not an action space of a controller ({error}); train it again") from error


@torch.no_grad()
def record_states(
    model: PausableModel,
    sample_keys: Sequence[tuple[Task, int]],
    networks: TwoStageNetworks,
    budgets_s: Sequence[float],
    source: Mapping[str, str],
    progress: LogLines | None = None,
) -> RecordedStates:
    """Run vision and the first blocks at every tier: once for each picture, and after it each sample's text.

    Args:
        sample_keys: task and sample id; those that come back are in this order.
        networks: their budget token is recorded; on the model's device.
        progress: is called for each sample that is done, failed ones among them.

    Raises:
        ResultsError: no sample could be used.
    """
    budgets = torch.tensor(budgets_s, dtype=torch.float64)
    recorder = _Recorder(model, networks.space, networks.budget_token(budgets))
    pictures, failed = questions_by_picture(model, sample_keys)
    found: dict[SampleKey, _States] = {}
    if progress is not None:
        progress.update(len(failed))
    with model.restored_afterwards():
        for questions in pictures:
            seen, refused = recorder.states(questions)
            found.update(seen)
            failed.update(refused)
            if progress is not None:
                progress.update(len(questions))
    if not found:
        raise ResultsError(
            f"none of {counted(len(sample_keys), 'sample')} could be used: {next(iter(failed.values()), 'none given')}"
        )
    keys = tuple(
        key for key in dict.fromkeys((task.name, sample_id) for task, sample_id in sample_keys) if key in found
    )
    prompts, last, tokens = (torch.stack(column) for column in zip(*(found[key] for key in keys), strict=True))
    weights = {name: tensor.cpu() for name, tensor in networks.budget.state_dict().items()}
    reasons = {f"{task} {sample_id}": reason for (task, sample_id), reason in failed.items()}
    splits = {task.name: task.split for task, _ in sample_keys}
    return RecordedStates(keys, prompts, last, tokens, budgets, networks.space, weights, reasons, dict(source), splits)


def without_states(states: RecordedStates, keys: Sequence[SampleKey]) -> dict[str, str]:
    """Each of the samples that has no states, as "task id" -> the reason."""
    recorded = set(states.keys)
    return {
        f"{task} {at}": states.failed.get(f"{task} {at}", "it was not requested when the states were recorded")
        for task, at in keys
        if (task, at) not in recorded
    }


def missing_caveats(missing: Mapping[str, str], number: int) -> list[ControllerCaveat]:
    """The caveat of samples without states, with the most frequent reasons; none where all have some."""
    if not missing:
        return []
    reasons = Counter(missing.values()).most_common()
    known = "; ".join(f"{reason} ({count})" for reason, count in reasons[:REASONS_SHOWN])
    more = f"; and {counted(len(reasons) - REASONS_SHOWN, 'other reason')}" if len(reasons) > REASONS_SHOWN else ""
    figures = {"num_without": len(missing), "num_samples": number}
    return [ControllerCaveat.of("without_states", **figures, reasons=f"{known}{more}")]


class _Recorder:
    """Records the states that both stages would see of the samples of one picture."""

    def __init__(self, model: PausableModel, space: ActionSpace, rows: torch.Tensor) -> None:
        self._model = model
        self._space = space
        self._rows = rows
        self._places = torch.tensor(space.pauses) - 1

    def states(self, questions: Sequence[PictureQuestion]) -> tuple[dict[SampleKey, _States], dict[SampleKey, str]]:
        """The states of each sample, or why there are none."""
        try:
            with library_faults_named(f"sample {questions[0].sample_id}"), out_of_memory_named():
                return dict(zip((each.key for each in questions), self._of_picture(questions), strict=True)), {}
        except SampleError as error:
            if len(questions) == 1:
                return {}, {questions[0].key: str(error)}
        # One by one: each has its own reason, and a text that is too long is none for the others.
        found: dict[SampleKey, _States] = {}
        failed: dict[SampleKey, str] = {}
        for question in questions:
            alone, refused = self.states([question])
            found.update(alone)
            failed.update(refused)
        return found, failed

    def _of_picture(self, questions: Sequence[PictureQuestion]) -> list[_States]:
        """The states of all samples of the picture; raises SampleError where one of them cannot be used."""
        sample = questions[0].read()
        traced = [self._traced(sample, tier, questions) for tier in self._space.knobs.tiers]
        return [
            (
                mean_embedding(self._model.host_embeddings, question.text),
                torch.stack([tier[place].last.float().cpu()[self._places] for tier in traced]),
                torch.stack([tier[place].appended.float().cpu()[self._places] for tier in traced]),
            )
            for place, question in enumerate(questions)
        ]

    def _traced(self, sample: Sample, tier: str, questions: Sequence[PictureQuestion]) -> list[TracedPrefill]:
        """Traces of the sample's picture without its text, and of each text after it."""
        model = self._model
        prepared = model.prepare(sample, "", tier_target(tier).crops)
        for question in questions:
            model.refuse_longer_prompt(question.key[1], prepared.shape.prompt_tokens + len(question.text))
        inputs = model.to_device(prepared.inputs)
        texts = [question.text.to(model.device) for question in questions]
        features = model.encode_image(inputs)
        return model.prompt_traces.trace(inputs["input_ids"], features, texts, self._space.pauses[-1], self._rows)
