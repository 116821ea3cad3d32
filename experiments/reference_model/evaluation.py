"""Scored answers of the embedded model by family, setting and type, with 95 % intervals.

Questions about one picture use its part of the cache, and settings of one tier use the same image features, which
changes the cost and not the answers. Intervals are taken between pictures, because questions about one picture are not
independent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import Cache

from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import MolmoeProcessor
from experiment_core_utils.primitives.knobs import CropRange, KnobSetting
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, answer_to

CONSTANT_CANDIDATES = 40


@dataclass(frozen=True)
class Answered:
    """The answer to one question at one setting; `expected` is what a perfect model would have said."""

    task: str
    setting: KnobSetting
    sample_id: int
    expected: str
    answer: Answer


@dataclass(frozen=True)
class Accuracy:
    """Mean score of n answers, with its 95 % interval."""

    n: int
    mean: float
    low: float
    high: float


@torch.inference_mode()
def answer_pictures(
    model: MolmoeForConditionalGeneration,
    processor: MolmoeProcessor,
    tasks: Sequence[GeneratedTask],
    pictures: Sequence[int],
    settings: Sequence[KnobSetting],
) -> Iterator[Answered]:
    """Greedy answers to every family's questions about the pictures, at every setting."""
    by_crops: dict[CropRange, list[KnobSetting]] = {}
    for setting in settings:
        by_crops.setdefault(setting.vision.crops, []).append(setting)
    for picture in pictures:
        samples = [(task, sample) for task in tasks for sample in samples_of(task, picture)]
        for crops, alike in by_crops.items():
            prefix = processor("", samples[0][1].image, crops)
            inputs = {
                name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
                for name, tensor in prefix.items()
            }
            features = model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])
            for setting in alike:
                model.set_knobs(setting.top_k, setting.active_blocks)
                _, state = model.prefill(
                    inputs["input_ids"], features, top_k=setting.top_k, active_blocks=setting.active_blocks
                )
                for task, sample in samples:
                    answer = _answer(model, processor, task, sample, state.past_key_values)
                    expected = str(sample.metadata["answer"])
                    yield Answered(task.name, setting, sample.sample_id, expected, answer_to(sample, answer))


def samples_of(task: GeneratedTask, picture: int) -> list[Sample]:
    """Every question of a family about a picture."""
    first = picture * task.questions_per_image
    return [task[index] for index in range(first, first + task.questions_per_image)]


def _answer(
    model: MolmoeForConditionalGeneration, processor: MolmoeProcessor, task: GeneratedTask, sample: Sample, cache: Cache
) -> str:
    """The greedy answer to one question after a picture that `cache` contains, which is left unchanged.

    The expected answer serves as a draft: one pass over question and draft shows how far greedy decoding would have
    said the same, and the next pass resumes after the first other token. The tokens are those of one at a time.
    """
    tokenizer = processor.tokenizer
    before = cache.get_seq_length()
    pending = tokenizer(task.prompt(sample), add_special_tokens=False)["input_ids"]
    draft = [*tokenizer(f" {sample.metadata['answer']}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    answer: list[int] = []
    while len(answer) < task.max_new_tokens and tokenizer.eos_token_id not in answer:
        fed = torch.tensor([[*pending, *draft]], device=model.device)
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=len(draft) + 1).logits[0]
        chosen = logits.argmax(dim=-1).tolist()
        agreed = next((at for at, token in enumerate(draft) if chosen[at] != token), len(draft))
        answer += chosen[: agreed + 1]
        cache.crop(agreed - len(draft))
        pending, draft = answer[-1:], draft[agreed + 1 :]
    cache.crop(before - cache.get_seq_length())
    ends = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
    return str(processor.decode(answer[: min(ends, task.max_new_tokens)])).strip()


def accuracy_of(answers: Sequence[Answer], metric: Metric) -> Accuracy:
    """Mean score and its interval; raises ValueError for no answers, or for scores that the metric cannot give."""
    return accuracy_by_type(answers, metric, whole=True)[""]


def accuracy_by_type(answers: Sequence[Answer], metric: Metric, *, whole: bool = False) -> dict[str, Accuracy]:
    """The accuracy of each type of question, in alphabetical order; `whole` puts all types together under "".

    The answers are scored all together first, because captions are scored against the pictures of the whole run.
    """
    if not answers:
        raise ValueError("there are no answers to take the accuracy of")
    values: dict[str, list[float]] = {}
    images: dict[str, list[str]] = {}
    for answer, score in zip(answers, metric.score(answers).scores, strict=True):
        if score.value is None:
            raise ValueError(f"{metric.name} has no score for these {len(answers)} answers: give it more pictures")
        kind = "" if whole else answer.question_type
        values.setdefault(kind, []).append(score.value)
        images.setdefault(kind, []).append(answer.image_id)
    return {kind: _accuracy(values[kind], images[kind], metric.best) for kind in sorted(values)}


def _accuracy(values: Sequence[float], images: Sequence[str], best: float) -> Accuracy:
    interval = bounded_mean_interval(values, images, best)
    assert interval is not None
    return Accuracy(len(values), sum(values) / len(values), *interval)


def best_constant(answered: Sequence[Answered], metric: Metric) -> Mapping[str, float]:
    """The score that a model without eyes can reach: for each type of question, that of the best constant answer.

    Tried are the most frequent expected answers of that type, at most `CONSTANT_CANDIDATES`, on these very questions.
    """
    levels: dict[str, float] = {}
    for kind in sorted({each.answer.question_type for each in answered}):
        of_type = [each for each in answered if each.answer.question_type == kind]
        frequent = Counter(each.expected for each in of_type).most_common(CONSTANT_CANDIDATES)
        levels[kind] = max(
            accuracy_of([replace(each.answer, prediction=candidate) for each in of_type], metric).mean
            for candidate, _ in frequent
        )
    return levels
