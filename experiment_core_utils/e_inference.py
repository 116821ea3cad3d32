"""In: a prepared request and a setting in force; out: its tokens and stage times, all from marks of that one run."""

from collections.abc import Mapping
from typing import Any

import torch

from experiment_core_utils.models.interface import StagedModel, Stages
from experiment_core_utils.primitives.device import Marks, new_marks, synchronize
from experiment_core_utils.primitives.records import StagedRun


def run_staged(model: StagedModel, inputs: Mapping[str, Any], max_new_tokens: int) -> StagedRun:
    """Greedy decoding of one request, with a mark between the stages.

    Marks: request handed over | features ready | first token | second token | … | last token. The choice of a token
    and its copy to the host belong to the interval that it ends. The knobs must be in force already.

    Args:
        inputs: tensors on the model's device.
    """
    synchronize(model.device)
    marks = new_marks(model.device)
    token_ids, has_vision = generate_greedily(model, inputs, max_new_tokens, marks)
    return _staged_run(token_ids, marks.seconds(), has_vision, token_ids[-1] in model.eos_token_ids)


@torch.inference_mode()
def generate_greedily(
    model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks
) -> tuple[list[int], bool]:
    """The stages one after the other; returns the ids (end-of-sequence included) and whether there was a picture."""
    marks.mark()
    features = model.encode_image(inputs)
    if features is not None:
        marks.mark()
    logits, state = model.prefill(inputs, features)
    token = logits.argmax(dim=-1, keepdim=True)
    token_ids = [int(token)]
    marks.mark()
    while token_ids[-1] not in model.eos_token_ids and len(token_ids) < max_new_tokens:
        logits = model.decode_step(token, state)
        token = logits.argmax(dim=-1, keepdim=True)
        token_ids.append(int(token))
        marks.mark()
    return token_ids, features is not None


def _staged_run(token_ids: list[int], spans: list[float], has_vision: bool, ended: bool) -> StagedRun:
    """Name the spans between the marks; their sum is the total by construction."""
    vision_s = spans[0] if has_vision else None
    first = 1 if has_vision else 0
    inter_token_s = tuple(spans[first + 1 :])
    return StagedRun(
        token_ids=tuple(token_ids),
        vision_s=vision_s,
        prefill_s=spans[first],
        decode_s=sum(inter_token_s) if inter_token_s else None,
        total_s=sum(spans),
        inter_token_s=inter_token_s,
        ended=ended,
    )
