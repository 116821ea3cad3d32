"""Scorers of block sets: how accurate the embedded model's answers about held-out pictures are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.describe import dtype_name
from experiment_core_utils.primitives.finite_logits import failure_named, refuse_not_finite
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, same_pictures
from experiment_core_utils.tasks.interface import Answer
from experiments.block_importance.answers import AnswerScorer, scored, with_blocks
from experiments.block_importance.importance import Blocks, Measured, TaskValues
from experiments.reference_model.evaluation import PictureModel, answer_pictures, placed, samples_of
from experiments.reference_model.packing import make_slot, slot_mask, slot_positions


@dataclass(eq=False)
class AnsweredPictureScorer:
    """A `BlockSetScorer` of the embedded model: each greedy answer's score, as a fraction of the metric's best.

    The scores of `AnswerScorer`, in a fraction of the time on a CPU: questions about one picture encode it once.
    Every set must contain block 0.
    """

    model: PictureModel
    tasks: Sequence[GeneratedTask]
    pictures: Sequence[int]
    setting: Setting  #: of which the blocks are replaced by each set
    measure = AnswerScorer.measure

    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """Too few pictures to score captions raise ConfigurationError."""
        settings = [with_blocks(self.setting, blocks) for blocks in dict.fromkeys(sets)]
        answers: dict[Blocks, dict[str, list[Answer]]] = {
            blocks_of(setting): {task.name: [] for task in self.tasks} for setting in settings
        }
        for picture in tqdm(self.pictures, unit="picture", desc=f"{counted(len(settings), 'set')} of blocks"):
            for each in answer_pictures(self.model, self.tasks, [picture], settings):
                answers[blocks_of(each.setting)][each.task].append(each.answer)
        return [{task.name: scored(task, answers[blocks][task.name]) for task in self.tasks} for blocks in sets]


@dataclass(eq=False)
class PackedPictureScorer:
    """A `BlockSetScorer` of the embedded model: the mean log-likelihood of an expected answer's tokens.

    End-of-sequence counts as a token. The samples are all questions of the tasks about the pictures.

    Args:
        model, processor: as of a `PictureModel`; all blocks active.
    """

    model: Any
    processor: Any
    tasks: Sequence[GeneratedTask]
    pictures: Sequence[int]
    crops: CropRange | None
    measure = "mean log-likelihood of the expected answer's tokens"

    @torch.inference_mode()
    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        """See `BlockSetScorer.measured`.

        Raises:
            GenerationFailed: logits are not finite.
        """
        values: dict[Blocks, dict[str, list[float]]] = {
            blocks: {task.name: [] for task in self.tasks} for blocks in sets
        }
        images: dict[str, list[str]] = {task.name: [] for task in self.tasks}
        drawn = list(product(self.pictures, same_pictures(self.tasks)))
        for picture, tasks in tqdm(drawn, unit="picture", desc=f"{counted(len(values), 'set')} of blocks"):
            pack = _Pack(self, tasks, picture)
            for task_name, image_id in pack.samples:
                images[task_name].append(image_id)
            with failure_named(f"picture {picture}", lambda: {"dtype": dtype_name(self.model.dtype)}):
                measured = pack.likelihoods(list(values))
            for blocks, likelihoods in measured.items():
                for (task_name, _), value in zip(pack.samples, likelihoods, strict=True):
                    values[blocks][task_name].append(value)
        return [
            {name: TaskValues(tuple(found), tuple(images[name])) for name, found in values[blocks].items()}
            for blocks in sets
        ]


class _Pack:
    """A picture with its questions and expected answers, embedded."""

    def __init__(self, scorer: PackedPictureScorer, tasks: Sequence[GeneratedTask], picture: int) -> None:
        self._model = model = scorer.model
        processor = scorer.processor
        samples = [(task, sample) for task in tasks for sample in samples_of(task, picture)]
        #: task and picture of each question
        self.samples = [(task.name, sample.image_id) for task, sample in samples]
        inputs = processor("", samples[0][1].image, scorer.crops)
        prefix = inputs["input_ids"].shape[1]
        ids, widths = inputs["input_ids"][0].tolist(), []
        self._answers: list[tuple[int, torch.Tensor]] = []
        for task, sample in samples:
            slot = make_slot(processor.tokenizer, task.prompt(sample), str(sample.metadata["answer"]))
            row = [*slot.prompt, *slot.answer[:-1]]
            self._answers.append((len(ids) + len(slot.prompt) - 1, torch.tensor(slot.answer)))
            ids += row
            widths.append(len(row))
        features = model.encode_image(
            *(placed(inputs[name], model) for name in ("pixel_values", "image_masks", "image_input_idx"))
        )
        device = model.device
        self._states = model.model.embed(torch.tensor([ids], device=device), features)
        positions = slot_positions(prefix, widths, len(ids)).to(device)[None]
        self._rotary = model.model.language_model.rotary_emb(self._states, positions)
        is_seen, dtype = slot_mask(prefix, widths, len(ids), device), self._states.dtype
        self._mask = torch.zeros_like(is_seen, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)

    def likelihoods(self, sets: Sequence[Blocks]) -> dict[Blocks, list[float]]:
        """The value of each sample, for each set."""
        found = {}
        done: list[int] = []
        states = [self._states]
        for blocks in sorted(sets):
            shared = next((at for at, pair in enumerate(zip(done, blocks, strict=False)) if pair[0] != pair[1]), None)
            kept = min(len(done), len(blocks)) if shared is None else shared
            del done[kept:], states[kept + 1 :]
            for block in blocks[kept:]:
                states.append(
                    self._model.all_blocks[block](
                        states[-1], attention_mask=self._mask, position_embeddings=self._rotary
                    )
                )
                done.append(block)
            found[blocks] = self._of_answers(states[-1][0])
        return found

    def _of_answers(self, states: torch.Tensor) -> list[float]:
        """Mean log-likelihood of each answer's tokens, from states [L, H] after the last block."""
        values = []
        for first, answer in self._answers:
            normed = self._model.model.language_model.norm(states[first : first + len(answer)])
            logits = self._model.lm_head(normed).float()
            refuse_not_finite(logits)
            loss = torch.nn.functional.cross_entropy(logits, answer.to(self._model.device))
            values.append(-float(loss))
        return values
