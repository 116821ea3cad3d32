"""In: prepared requests of any lengths and pictures; out: the greedy answer of each, computed together.

Nothing here is timed. In float32 the answers are those that the stages give one request at a time; in lower precision
the last bits of a product depend on how many rows it has, so that two tokens which are nearly equally likely can change
places.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiment_core_utils.models.decode_kernels import DecodeKernels
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures

DROPPED = -100


@torch.inference_mode()
def answer_together(
    model: MolmoeForConditionalGeneration,
    requests: Sequence[Mapping[str, Any]],
    eos_token_ids: frozenset[int],
    max_new_tokens: int,
) -> list[tuple[int, ...]]:
    """Token ids of each request under the setting in force, end-of-sequence included where it came.

    Args:
        requests: tensors on the model's device, as for the stages: `input_ids` [1, T], with a picture also
            `pixel_values`, `image_masks` and `image_input_idx`.
    """
    top_k, blocks = model.active_setting
    ids, mask = _left_padded(requests, pad_token=model.config.pad_token_id)
    length = ids.shape[1]
    is_padded = not bool(mask.all())
    mask = torch.nn.functional.pad(mask, (0, max_new_tokens), value=1)
    features = _placed_features(model, requests, length)
    logits, state = model.prefill(
        ids, features, attention_mask=mask[:, :length] if is_padded else None, top_k=top_k, active_blocks=blocks
    )
    answers: list[list[int]] = [[] for _ in requests]
    open_answers = set(range(len(requests)))
    with DecodeKernels(model).taken():
        for step in range(1, max_new_tokens + 1):
            # The rows whose answers have ended go on unheeded; no row sees another.
            tokens = logits.argmax(dim=-1, keepdim=True)
            chosen = tokens.flatten().tolist()
            for row in tuple(open_answers):
                answers[row].append(chosen[row])
                if chosen[row] in eos_token_ids:
                    open_answers.remove(row)
            if not open_answers or step == max_new_tokens:
                break
            seen = mask[:, : length + step] if is_padded else None
            logits = model.decode_step(tokens, state, attention_mask=seen)
    return [tuple(answer) for answer in answers]


def _left_padded(requests: Sequence[Mapping[str, Any]], pad_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [B, T] that end together, and their mask [B, T], 0 where padded."""
    rows = [request["input_ids"] for request in requests]
    length = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    ids = torch.cat([pad(row, (length - row.shape[1], 0), value=pad_token) for row in rows])
    mask = torch.cat([pad(torch.ones_like(row), (length - row.shape[1], 0)) for row in rows])
    return ids, mask


def _placed_features(
    model: MolmoeForConditionalGeneration, requests: Sequence[Mapping[str, Any]], length: int
) -> MolmoeImageFeatures | None:
    """Each picture's features, encoded alone as the stages do it, at places moved by the padding; None without any."""
    encoded = {
        row: (
            model.encode_image(request["pixel_values"], request["image_masks"], request["image_input_idx"]),
            length - request["input_ids"].shape[1],
        )
        for row, request in enumerate(requests)
        if "pixel_values" in request
    }
    if not encoded:
        return None
    like = next(iter(encoded.values()))[0].pooler_output
    most = max(features.pooler_output.shape[1] for features, _ in encoded.values())
    pooled = like.new_zeros(len(requests), most, like.shape[2])
    places = torch.full((len(requests), most), DROPPED, dtype=torch.long, device=like.device)
    for row, (features, shift) in encoded.items():
        count = features.pooler_output.shape[1]
        pooled[row, :count] = features.pooler_output[0]
        own = features.image_input_idx[0]
        places[row, :count] = torch.where(own < 0, DROPPED, own + shift)
    return MolmoeImageFeatures(pooler_output=pooled, image_input_idx=places)
