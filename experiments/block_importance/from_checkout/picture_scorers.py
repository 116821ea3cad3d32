"""Scorers of blocks by pictures: how likely the right answers are to the embedded model, and gradients of their loss.

The latter is how much the loss of the right answer would change if the block's output were its input, to first order:
|sum of dL/d(output) * (output - input)| over all positions (P. Molchanov et al., "Importance Estimation for Neural
Network Pruning", CVPR 2019, there for the parameters of a filter).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from tqdm import tqdm

from experiment_core_utils.engines.answer_ends import turn_end
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, VisionTarget, vision_of
from experiment_core_utils.models.common.describe import dtype_name
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import Runnable, StagedModel
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.finite_logits import failure_named, refuse_not_finite
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, same_pictures
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiments.block_importance.answers import DrawnTask
from experiments.block_importance.importance import Blocks, Measured, TaskValues, watched_blocks
from experiments.block_importance.proxies import of_all_samples


def gradient_importances(model: StagedModel, drawn: Sequence[DrawnTask], setting: Setting) -> dict[int, Measured]:
    """Each block's first-order change of the loss of each sample's expected answer; see `expected_answer`.

    The loss is the sum of -log p over the answer's tokens and the end of the sequence, one stage call a token, so that
    it works with any staged model. Samples whose answer has no token of its own are left out.
    """

    def of_sample(drawn_task: DrawnTask, sample: Sample, inputs: Mapping[str, Any]) -> list[float]:
        target = answer_tokens(model, drawn_task.task, sample, inputs, vision_of(setting))
        calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []

        def seen(block: int, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
            replaced = None if output.requires_grad else output.detach().requires_grad_()
            calls.append((block, given, output if replaced is None else replaced))
            return replaced

        with torch.no_grad():
            features = model.encode_image(inputs)
        with torch.enable_grad(), watched_blocks(model.decoder_blocks, seen):
            loss = _answer_loss(model, inputs, features, target)
            gradients = torch.autograd.grad(loss, [output for _, _, output in calls], allow_unused=True)
        changes = [0.0] * model.num_total_blocks
        for (block, given, output), gradient in zip(calls, gradients, strict=True):
            if gradient is not None:
                changes[block] += float((gradient.float() * (output.detach() - given.detach()).float()).sum())
        return [abs(change) for change in changes]

    return of_all_samples(model, drawn, setting, of_sample)


def expected_answer(sample: Sample) -> str:
    """What a perfect model would say: the letter of the right option, else the most frequent reference answer."""
    if sample.options and sample.answer_index is not None:
        return chr(ord("A") + sample.answer_index)
    return max(sample.answers, key=sample.answers.count)


def answer_tokens(
    model: StagedModel, task: Task, sample: Sample, inputs: Mapping[str, Any], vision: VisionTarget
) -> list[int]:
    """The tokens of the expected answer behind a prompt, and one that ends an answer.

    In a chat the answer is the assistant's, behind the template's last word; else what follows the prompt and a space.

    Raises:
        SampleError: the answer adds no token, or the sample has none.
    """
    if not sample.answers:
        raise SampleError(f"sample {sample.sample_id} has no reference answer")
    whole, end = task[sample.sample_id], tuple(sorted(model.ends.token_ids))
    prompt, answer = prompt_for(task, whole, model.prompt_family), expected_answer(sample)
    if isinstance(model, TransformersModel) and model.requests.chat_template is not None:
        tokenizer = model.requests.tokenizer
        text = model.prepare(whole, prompt, vision.crops).text
        texts = text, f"{text}{' ' if text.endswith(':') else ''}{answer}"
        before, with_answer = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in texts)
        end = turn_end(tokenizer, model.requests.chat_template) or end
    else:
        before = inputs["input_ids"][0].tolist()
        with_answer = model.prepare(whole, f"{prompt} {answer}", vision.crops).inputs["input_ids"][0].tolist()
    shared = next((at for at, (a, b) in enumerate(zip(before, with_answer, strict=False)) if a != b), len(before))
    if shared < len(before) or len(with_answer) <= shared:
        raise SampleError(f"sample {sample.sample_id}: the tokenizer does not separate its answer from its prompt")
    return [*with_answer[shared:], *end[:1]]


def _answer_loss(model: StagedModel, inputs: Mapping[str, Any], features: Any, target: Sequence[int]) -> torch.Tensor:
    # A penalty or a forbidden token is no probability of the model's.
    with model.raw_logits() if isinstance(model, TransformersModel) else nullcontext():
        logits, state = model.prefill(inputs, features)
    refuse_not_finite(logits.detach())
    loss = logits.new_zeros((), dtype=torch.float32)
    for place, token in enumerate(target):
        expected = torch.tensor([token], device=logits.device)
        loss = loss + nn.functional.cross_entropy(logits.float(), expected)
        if place + 1 < len(target):
            logits = model.decode_step(expected[None], state)
            refuse_not_finite(logits.detach())
    return loss


class PictureModel(StagedModel, Protocol):
    """A `StagedModel` whose modules can be called with several questions after one picture: a MolmoE."""

    model: Any  #: the modules
    processor: Any  #: (text, picture, range of crops) -> ids, crops, masks and places


def is_picture_model(model: Runnable) -> TypeGuard[PictureModel]:
    """Whether a model is a `PictureModel`: its processor is at hand, and it is asked as a MolmoE."""
    return hasattr(model, "processor") and model.prompt_family == "molmo"


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
    """A picture with its questions and expected answers, embedded side by side.

    A picture is costly and a question is cheap, so that all use one picture: each sees the picture and itself, at the
    positions that it has alone.
    """

    def __init__(self, scorer: PackedPictureScorer, tasks: Sequence[GeneratedTask], picture: int) -> None:
        self._model = model = scorer.model
        tokenizer = scorer.processor.tokenizer
        samples = [(task, task[index]) for task in tasks for index in task.about(picture)]
        #: task and picture of each question
        self.samples = [(task.name, sample.image_id) for task, sample in samples]
        inputs = scorer.processor("", samples[0][1].image, scorer.crops)
        ids = inputs["input_ids"][0].tolist()
        prefix = len(ids)
        self._answers: list[tuple[int, torch.Tensor]] = []
        owners, positions = [0] * prefix, [*range(prefix)]  # of each token: the question that it is of, from 1 on
        for number, (task, sample) in enumerate(samples, 1):
            prompt, answer = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (task.prompt(sample), f" {sample.metadata['answer']}")
            )
            self._answers.append((len(ids) + len(prompt) - 1, torch.tensor([*answer, tokenizer.eos_token_id])))
            row = [*prompt, *answer]
            ids += row
            owners += [number] * len(row)
            positions += range(prefix, prefix + len(row))
        features = model.encode_image(
            *(
                inputs[name].to(model.device, model.dtype if inputs[name].is_floating_point() else None)
                for name in ("pixel_values", "image_masks", "image_input_idx")
            )
        )
        owner_ids, position_ids = torch.tensor([owners, positions], device=model.device)
        self._states = model.model.embed(torch.tensor([ids], device=model.device), features)
        self._rotary = model.model.language_model.rotary_emb(self._states, position_ids[None])
        is_seen = ((owner_ids[:, None] == owner_ids) | (owner_ids == 0)).tril()[None, None]
        dtype = self._states.dtype
        self._mask = torch.zeros_like(is_seen, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)

    def likelihoods(self, sets: Sequence[Blocks]) -> dict[Blocks, list[float]]:
        """The value of each sample, for each set."""
        likelihoods = {}
        computed: list[int] = []
        states = [self._states]
        for blocks in sorted(sets):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(computed, blocks, strict=False))
            num_shared = sum(1 for _ in same)
            del computed[num_shared:], states[num_shared + 1 :]
            for block in blocks[num_shared:]:
                states.append(
                    self._model.all_blocks[block](
                        states[-1], attention_mask=self._mask, position_embeddings=self._rotary
                    )
                )
                computed.append(block)
            values = []
            for first, answer in self._answers:
                normed = self._model.model.language_model.norm(states[-1][0][first : first + len(answer)])
                logits = self._model.lm_head(normed).float()
                refuse_not_finite(logits)
                loss = torch.nn.functional.cross_entropy(logits, answer.to(self._model.device))
                values.append(-float(loss))
            likelihoods[blocks] = values
        return likelihoods
