"""Scored answers of the embedded model by family, setting and type, with 95 % intervals.

Questions about one picture use its part of the cache, and settings of one tier use the same image features, which
changes the cost and not the answers. Intervals are taken between pictures, because questions about one picture are not
independent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, product
from typing import Any, Protocol, TypeGuard

import torch
from transformers import Cache

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.models.interface import Runnable, StagedModel
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.finite_logits import failure_named, refuse_not_finite
from experiment_core_utils.primitives.statistics import bounded_mean_interval
from experiment_core_utils.records.stages import MODULES
from experiment_core_utils.tasks.datasets.reference_task import GeneratedTask, same_pictures
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, answer_to
from experiments.reference_model.packing import make_slot, slot_mask, slot_positions

CONSTANT_CANDIDATES = 40


@dataclass(frozen=True)
class Answered:
    """The answer to one question at one setting; `expected` is what a perfect model would have said."""

    task: str
    setting: Setting
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


class PictureModel(StagedModel, Protocol):
    """A `StagedModel` whose modules can be called with several questions after one picture: a MolmoE."""

    model: Any  #: the modules
    processor: Any  #: (text, picture, range of crops) -> ids, crops, masks and places


def is_picture_model(model: Runnable) -> TypeGuard[PictureModel]:
    """Whether a model is a `PictureModel`: its processor is at hand, and it is asked as a MolmoE."""
    return hasattr(model, "processor") and model.prompt_family == "molmo"


@torch.inference_mode()
def answer_pictures(
    model: PictureModel,
    tasks: Sequence[GeneratedTask],
    pictures: Sequence[int],
    settings: Sequence[Setting],
) -> Iterator[Answered]:
    """Greedy answers to every family's questions about the pictures, at every setting; the last one stays in force.

    Args:
        model: one whose modules run.

    Raises:
        ConfigurationError: an engine runs the prefill.
        GenerationFailed: logits are not finite.
    """
    prefill = model.describe()["execution_stages"]["prefill"]
    if prefill != MODULES:
        raise ConfigurationError(
            f"the prefill of {model.name} is run by its {prefill} engine, which keeps no cache that several questions "
            "share; load the model with --execution eager"
        )
    by_crops: dict[CropRange | None, list[Setting]] = {}
    for setting in settings:
        by_crops.setdefault(vision_of(setting).bounds, []).append(setting)
    for picture, alike in product(pictures, same_pictures(tasks)):
        samples = [(task, sample) for task in alike for sample in samples_of(task, picture)]
        for crops, of_tier in by_crops.items():
            inputs = model.to_device(model.processor("", samples[0][1].image, crops))
            features = model.encode_image(inputs)
            for setting in of_tier:
                model.apply(setting)
                _, state = model.prefill(inputs, features)
                with failure_named(f"picture {picture}", model.describe):
                    answers = _answers(model.model, model.processor, samples, state.past_key_values)
                for (task, sample), answer in zip(samples, answers, strict=True):
                    expected = str(sample.metadata["answer"])
                    yield Answered(task.name, setting, sample.sample_id, expected, answer_to(sample, answer))


def samples_of(task: GeneratedTask, picture: int) -> list[Sample]:
    """Every question of a family about a picture."""
    first = picture * task.questions_per_image
    return [task[index] for index in range(first, first + task.questions_per_image)]


@dataclass
class _Question:
    """A question with what greedy decoding is known to answer, and the draft of the rest."""

    prompt: list[int]
    draft: list[int]
    longest: int
    end: int
    answer: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.answer) >= self.longest or self.end in self.answer

    @property
    def row(self) -> list[int]:
        """The ids to pass."""
        return [*self.prompt, *self.answer, *self.draft]

    def take(self, chosen: list[int]) -> None:
        """Take over the most likely tokens after the last known one and each of the draft's, as far as it agrees."""
        agreed = next((at for at, token in enumerate(self.draft) if chosen[at] != token), len(self.draft))
        self.answer += chosen[: agreed + 1]
        self.draft = self.draft[agreed + 1 :]

    @property
    def answered(self) -> list[int]:
        """The answer up to its end."""
        ends = self.answer.index(self.end) + 1 if self.end in self.answer else len(self.answer)
        return self.answer[: min(ends, self.longest)]


def _answers(
    model: Any,
    processor: Any,
    samples: Sequence[tuple[GeneratedTask, Sample]],
    cache: Cache,
) -> list[str]:
    """The greedy answers to questions after a picture that `cache` contains, which is left unchanged.

    The expected answers serve as drafts: one pass over all questions and drafts shows how far greedy decoding would
    have said the same, and the next pass resumes after each first other token. The tokens are those of one at a time.
    """
    tokenizer = processor.tokenizer
    before = cache.get_seq_length()
    end = tokenizer.eos_token_id
    questions = []
    for task, sample in samples:
        slot = make_slot(tokenizer, task.prompt(sample), str(sample.metadata["answer"]))
        questions.append(_Question(slot.prompt, slot.answer, task.max_new_tokens, end))
    while open_ones := [each for each in questions if not each.is_done]:
        rows = [each.row for each in open_ones]
        widths = [len(row) for row in rows]
        total = before + sum(widths)
        logits = model(
            input_ids=torch.tensor([[*chain(*rows)]], device=model.device),
            position_ids=slot_positions(before, widths, total)[None, before:].to(model.device),
            attention_mask=slot_mask(before, widths, total, model.device)[:, :, before:],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        cache.crop(before - total)
        chosen = logits.argmax(dim=-1).tolist()
        refuse_not_finite(logits)
        for each, end_of_row in zip(open_ones, accumulate(widths), strict=True):
            each.take(chosen[end_of_row - len(each.draft) - 1 : end_of_row])
    return [str(processor.decode(question.answered)).strip() for question in questions]


def placed(tensor: torch.Tensor, model: Any) -> torch.Tensor:
    """An input on the model's device, in its precision where it is a number with a fraction."""
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)


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
