"""An estimate of a block's importance by gradients.

It is how much the loss of the right answer would change if the block's output were its input, to first order:
|sum of dL/d(output) * (output - input)| over all positions (P. Molchanov et al., "Importance Estimation for Neural
Network Pruning", CVPR 2019, there for the parameters of a filter).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from experiment_core_utils.engines.answer_ends import turn_end
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import VisionTarget, vision_of
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.finite_logits import refuse_not_finite
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiments.block_importance.answers import DrawnTask
from experiments.block_importance.importance import Measured, watched_blocks
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
