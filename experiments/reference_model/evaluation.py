"""In: the embedded model and held-out samples; out: accuracy by setting and type of question, with 95 % intervals.

Questions about one picture share its features and its part of the cache, which changes the cost and not the answers.
Intervals come from a bootstrap over pictures, because questions about one picture are not independent.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from experiment_core_utils.g_metrics_inference import answer_to
from experiment_core_utils.models.molmoe.modeling_molmoe import DecodeState, MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, Task

RESAMPLES = 2000


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer at one setting; `score` is None where the metric has none (CIDEr of fewer than two pictures)."""

    sample_id: int
    image_id: str
    question_type: str
    prediction: str
    score: float | None


@dataclass(frozen=True)
class Accuracy:
    """Mean score of n answers, with the 95 % interval of a bootstrap over pictures."""

    n: int
    mean: float
    low: float
    high: float


@torch.inference_mode()
def answer_samples(
    model: MolmoeForConditionalGeneration,
    processor: MolmoeProcessor,
    task: Task,
    metric: Metric,
    sample_ids: Sequence[int],
    setting: KnobSetting,
) -> list[ScoredAnswer]:
    """Greedy answers at `setting`, neighbouring samples of one picture together, scored over all of them at once."""
    model.set_knobs(setting.top_k, setting.active_blocks)
    answered: list[tuple[int, Answer]] = []
    drawn = (task[sample_id] for sample_id in sample_ids)
    for _, group in groupby(drawn, key=lambda sample: sample.image_id):
        samples = list(group)
        prefix = processor("", samples[0].image, setting.vision.crops)
        inputs = {name: _placed(tensor, model) for name, tensor in prefix.items()}
        features = model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
        _, state = model.prefill(
            inputs["input_ids"], features, top_k=setting.top_k, active_blocks=setting.active_blocks
        )
        for sample in samples:
            prediction = _answer(model, processor, task, sample, copy.deepcopy(state))
            answered.append((sample.sample_id, answer_to(sample, prediction)))
    scores = metric.score([answer for _, answer in answered]).scores
    return [
        ScoredAnswer(sample_id, answer.image_id, answer.question_type, answer.prediction, score.value)
        for (sample_id, answer), score in zip(answered, scores, strict=True)
    ]


def _answer(
    model: MolmoeForConditionalGeneration, processor: MolmoeProcessor, task: Task, sample: Sample, state: DecodeState
) -> str:
    """The answer to one question behind a picture that `state` has seen already."""
    ids = processor.tokenizer(task.prompt(sample), add_special_tokens=False, return_tensors="pt")["input_ids"]
    logits, state = model.prefill(
        ids.to(model.device),
        top_k=state.top_k,
        active_blocks=state.active_blocks,
        past_key_values=state.past_key_values,
    )
    tokens = [int(logits.argmax())]
    while tokens[-1] != processor.tokenizer.eos_token_id and len(tokens) < task.max_new_tokens:
        tokens.append(int(model.decode_step(torch.tensor([[tokens[-1]]], device=model.device), state).argmax()))
    return processor.decode(tokens).strip()


def _placed(tensor: torch.Tensor, model: MolmoeForConditionalGeneration) -> torch.Tensor:
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)


def accuracy_of(answers: Sequence[ScoredAnswer], seed: int = 0) -> Accuracy:
    """Mean score and its interval; raises ValueError where no answer has a score."""
    by_image: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.score is not None:
            by_image[answer.image_id].append(answer.score)
    if not by_image:
        raise ValueError("there are no answers to take the accuracy of")
    sums = np.array([sum(scores) for scores in by_image.values()])
    counts = np.array([len(scores) for scores in by_image.values()])
    picks = np.random.default_rng(seed).integers(0, len(sums), size=(RESAMPLES, len(sums)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Accuracy(int(counts.sum()), float(sums.sum() / counts.sum()), float(low), float(high))


def accuracy_by_type(answers: Sequence[ScoredAnswer]) -> dict[str, Accuracy]:
    """`accuracy_of` for each type of question."""
    types = sorted({answer.question_type for answer in answers})
    return {kind: accuracy_of([answer for answer in answers if answer.question_type == kind]) for kind in types}
