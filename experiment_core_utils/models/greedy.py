"""In: a model's three stages and a request on its device; out: its greedy answer, with a mark where a stage ends."""

from collections.abc import Mapping
from typing import Any

import torch

from experiment_core_utils.models.interface import Stages
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.records import MarkedTokens, StageName


@torch.inference_mode()
def generate_greedily(model: Stages, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> MarkedTokens:
    """The stages one after the other, at most `max_new_tokens` tokens.

    The choice of a token and its copy to the host belong to the interval that it ends.
    """
    spans: list[StageName] = []
    marks.mark()
    features = model.encode_image(inputs)
    if features is not None:
        marks.mark()
        spans.append("vision")
    logits, state = model.prefill(inputs, features)
    token = logits.argmax(dim=-1, keepdim=True)
    token_ids = [int(token)]
    marks.mark()
    spans.append("prefill")
    while token_ids[-1] not in model.eos_token_ids and len(token_ids) < max_new_tokens:
        logits = model.decode_step(token, state)
        token = logits.argmax(dim=-1, keepdim=True)
        token_ids.append(int(token))
        marks.mark()
        spans.append("decode")
    return MarkedTokens(tuple(token_ids), tuple(spans))
