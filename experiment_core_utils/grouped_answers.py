"""In: requests that want different settings of the knobs; out: the greedy answer of each, computed in groups.

A setting is the whole model's, so that requests can only be computed together where they want the same one. Nothing
here is timed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.knobs import CropRange, KnobSetting
from experiment_core_utils.primitives.records import PreparedRequest
from experiment_core_utils.tasks.interface import Sample

GroupKey = tuple[CropRange, int | None, tuple[int, ...]]


@dataclass(frozen=True)
class Asked:
    """A question about a sample, to be answered at a setting of its own; a sample without a picture will do."""

    sample: Sample
    prompt: str
    setting: KnobSetting


@dataclass(frozen=True)
class PreparedQuestion:
    """The same as tensors."""

    request: PreparedRequest
    setting: KnobSetting


def answer_grouped(
    model: StagedModel, asked: Sequence[Asked], max_new_tokens: int, max_batch_size: int
) -> list[tuple[int, ...]]:
    """Token ids of each answer in the order of the questions, end-of-sequence included where it came.

    In float32 they are those of each question alone at its setting. The setting in force before comes back, also after
    an error.

    Raises:
        SampleError: a sample cannot be used; nothing is answered then.
        ConfigurationError: a setting that the model does not have, or `max_batch_size` below 1.
        OutOfMemory: a batch does not fit; give a smaller `max_batch_size`.
    """
    prepared = [
        PreparedQuestion(model.prepare(each.sample, each.prompt, each.setting.vision.crops), each.setting)
        for each in asked
    ]
    return answer_prepared(model, prepared, max_new_tokens, max_batch_size)


def answer_prepared(
    model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int, max_batch_size: int
) -> list[tuple[int, ...]]:
    """See `answer_grouped`."""
    answers: dict[int, tuple[int, ...]] = {}
    with model.kept():
        for places in batches_of(questions, max_batch_size):
            model.apply(questions[places[0]].setting)
            with out_of_memory_named():
                inputs: list[Mapping[str, Any]] = [model.to_device(questions[place].request.inputs) for place in places]
                answers.update(zip(places, model.answer_batch(inputs, max_new_tokens), strict=True))
    return [answers[place] for place in range(len(questions))]


def batches_of(questions: Sequence[PreparedQuestion], max_batch_size: int) -> list[tuple[int, ...]]:
    """Places of the questions that are computed together: same crops, top-k and blocks, at most so many.

    Groups come in the order of their first question. Within a group shorter prompts come first, so that little is
    padded.

    Raises:
        ConfigurationError: `max_batch_size` below 1.
    """
    if max_batch_size < 1:
        raise ConfigurationError(f"batches of {max_batch_size} hold nothing; give a max_batch_size of at least 1")
    groups: dict[GroupKey, list[int]] = {}
    for place, question in enumerate(questions):
        setting = question.setting
        groups.setdefault((setting.vision.crops, setting.top_k, setting.active_blocks), []).append(place)
    batches = []
    for places in groups.values():
        places.sort(key=lambda place: questions[place].request.shape.prompt_tokens)
        batches += [tuple(places[at : at + max_batch_size]) for at in range(0, len(places), max_batch_size)]
    return batches
