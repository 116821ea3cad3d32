"""Greedy answers of a transformers model's own `generate()` to one request, or to a batch of any lengths and pictures.

    requests handed over | encoder begins | features ready | first tokens on the host | second | ... | last

Neighbouring marks bound a stage, so that the stages add up to the whole by construction. What is before the encoder
and between it and the first token is prefill: `generate()`'s own preparation, the cache, the decoder. Some versions and
families encode pictures before the prefill, others inside it; the marks are the same.

Blocks of some families look at the padding, or at the other requests: whether the answers are
those of one request at a time, `follow_together` shows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.greedy import BatchFollower
from experiment_core_utils.models.common.preferences import NO_PREFERENCES, Preferences
from experiment_core_utils.models.common.text_generation import generate_marked
from experiment_core_utils.models.hf.generate import StageMarks, processors_for, vision_marked
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.finite_logits import logits_watched
from experiment_core_utils.records.requests import FollowedAnswer, StageName, TimedBatch

Around = Callable[[torch.Tensor], AbstractContextManager[object]]


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    requests: Sequence[Mapping[str, Any]],
    ends: AnswerEnds,
    max_new_tokens: int,
    marks: Marks,
    preferences: Preferences = NO_PREFERENCES,
    around: Around = nullcontext,
) -> TimedBatch:
    """The answers to requests of one kind under the setting in force, padded to one batch before the first mark.

    The model's generation config must be one of `greedy_config`, without end-of-sequence where ends are ignored.

    Args:
        requests: tensors on the model's device, as `generate()` takes them.
        preferences: of the checkpoint, applied to each row without its padding.
        around: makes a context for the run of a batch, from its ids.

    Raises:
        LogitsNotFinite: those of an answer that has not ended are not finite.
    """
    merged = merge_requests(requests, int(model.generation_config.pad_token_id))
    stages, names, ids = StageMarks(marks), chain[StageName](["prefill"], repeat("decode")), merged["input_ids"]
    with vision_marked(model, stages), logits_watched(model) as watch, around(ids):
        stages.begin()
        answered = generate_marked(
            model,
            merged,
            [ends] * len(requests),
            lambda: stages.end(next(names)),
            max_new_tokens=max_new_tokens,
            logits_processor=processors_for(model, merged, preferences, ends),
        )
    # Rows that ended before the longest are padded after their end.
    ended = [ends.generated(row) for row in answered.tolist()]
    watch.refuse_not_finite([len(row) for row in ended])
    return TimedBatch(tuple(map(tuple, ended)), tuple(stages.spans))


@torch.inference_mode()
def follow_together(
    model: PreTrainedModel,
    requests: Sequence[Mapping[str, Any]],
    answers: Sequence[tuple[int, ...]],
    around: Around = nullcontext,
) -> list[FollowedAnswer]:
    """What the same `generate()` would choose after each beginning of these answers, in the same batches."""
    found: dict[int, FollowedAnswer] = {}
    for places in alike(requests):
        merged = merge_requests([requests[place] for place in places], int(model.generation_config.pad_token_id))
        follower = BatchFollower([answers[place] for place in places], merged["input_ids"].device)
        follow = LogitsProcessorList([_Follow(follower)])
        with around(merged["input_ids"]):
            model.generate(**merged, max_new_tokens=follower.num_positions, logits_processor=follow)
        found |= dict(zip(places, follower.followed, strict=True))
    return [found[place] for place in range(len(requests))]


class _Follow(LogitsProcessor):
    """Leaves `generate()` no other choice than the next tokens of the answers."""

    def __init__(self, follower: BatchFollower) -> None:
        self._follower = follower

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self._follower.follow(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def alike(requests: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Places of the requests that can be in one batch: the same arguments, pictures of shapes that fit."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(request_kind(request), []).append(place)
    return list(groups.values())


def request_kind(request: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for requests that can be put together: pictures [1, crops, ...] may differ in the number of crops, as a
    processor pads it; other tensors in rows.
    """
    return tuple(
        sorted(
            (name, tensor.dim(), tuple(tensor.shape[2 if _has_crops(tensor) else 1 :]))
            for name, tensor in request.items()
            if name != "input_ids" and name not in ALONG_THE_PROMPT
        )
    )


def _has_crops(tensor: torch.Tensor) -> bool:
    """Whether a tensor is [1, crops, channels, height, width], or a mask [1, crops, height, width] of it."""
    return tensor.dim() >= 4 and tensor.shape[0] == 1


def merge_requests(requests: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """The tensors of a batch: prompts end together, pictures have as many crops as the largest; those of one request as
    they are.
    """
    if len(requests) == 1:
        return dict(requests[0])
    fillings = {"input_ids": pad_token_id, **ALONG_THE_PROMPT}
    merged = {}
    for name in requests[0]:
        tensors = [request[name] for request in requests]
        if name in fillings:
            longest = max(tensor.shape[1] for tensor in tensors)
            pad = torch.nn.functional.pad
            tensors = [pad(tensor, (longest - tensor.shape[1], 0), value=fillings[name]) for tensor in tensors]
        elif all(_has_crops(tensor) for tensor in tensors):
            tensors = [_with_crops(tensor, max(each.shape[1] for each in tensors)) for tensor in tensors]
        merged[name] = torch.cat(tensors)
    return merged


def _with_crops(tensor: torch.Tensor, crops: int) -> torch.Tensor:
    """The tensor padded with zeros to a number of crops, as processors do it."""
    if tensor.shape[1] == crops:
        return tensor
    filled = tensor.new_zeros(1, crops, *tensor.shape[2:])
    filled[:, : tensor.shape[1]] = tensor
    return filled
