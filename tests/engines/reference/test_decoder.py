"""The reference engine gives eager's logits and tokens, for every kind of decoder whose weights can be fused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from tests.conftest import tiny_config

STEPS = 6
ALL = (0, 1, 2, 3)
PROMPTS = [
    torch.tensor([[7, 20, 33, 46, 59, 72, 85, 98]]),
    torch.tensor([[5, 4, 3]]),
    torch.tensor([[9]]),
]


def plain(text: Any) -> None:
    pass


def one_kv_head(text: Any) -> None:
    text.num_key_value_heads = 1


def normalised(text: Any) -> None:
    text.norm_topk_prob = True


def four_heads_two_shared(text: Any) -> None:
    text.num_attention_heads, text.num_key_value_heads, text.norm_topk_prob = 4, 2, True


def odd_sizes(text: Any) -> None:
    text.num_experts, text.num_experts_per_tok, text.intermediate_size, text.vocab_size = 5, 3, 12, 515


def built(change: Callable[[Any], None] = plain, dtype: torch.dtype = torch.float32) -> MolmoeForConditionalGeneration:
    config = tiny_config()
    change(config.text_config)
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(config).eval().to(dtype)


def eager_run(model: MolmoeForConditionalGeneration, prompt: torch.Tensor, knobs: EngineKnobs) -> torch.Tensor:
    """Logits [STEPS, V] behind the prompt and each of the likeliest tokens after it."""
    with torch.inference_mode():
        logits, state = model.prefill(prompt, top_k=knobs.top_k, active_blocks=knobs.blocks)
        found = [logits]
        while len(found) < STEPS:
            found.append(model.decode_step(found[-1].argmax(dim=-1, keepdim=True), state))
    return torch.cat(found)


def reference_run(decoder: DecoderWeights, prompt: torch.Tensor, knobs: EngineKnobs) -> torch.Tensor:
    """As `eager_run`."""
    kv_cache = KVCache.allocate(decoder, max_seq_len=prompt.shape[1] + STEPS - 1)
    # Slots past the length are never read.
    kv_cache.keys.fill_(float("nan"))
    kv_cache.values.fill_(float("nan"))
    found = [ReferencePrefill(decoder).prefill(decoder.embedding[prompt[0]], knobs, kv_cache)]
    kv_cache.set_lengths([prompt.shape[1]])
    kv_cache.next_tokens.copy_(found[0].argmax(dim=-1))
    decode = ReferenceDecode(decoder)
    while len(found) < STEPS:
        found.append(decode.step(knobs, kv_cache))
        kv_cache.note_step()
    return torch.cat(found)


@pytest.mark.parametrize(
    "knobs", [EngineKnobs(4, ALL), EngineKnobs(1, ALL), EngineKnobs(2, (0, 2)), EngineKnobs(3, (0,))]
)
@pytest.mark.parametrize("change", [plain, one_kv_head, normalised, four_heads_two_shared, odd_sizes])
@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_logits_and_tokens_are_those_of_eager(
    change: Callable[[Any], None], knobs: EngineKnobs, prompt: torch.Tensor
) -> None:
    model = built(change)
    expected = eager_run(model, prompt, knobs)
    found = reference_run(fuse_decoder_weights(model), prompt, knobs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))


def test_bfloat16_is_as_near_to_float32_as_eager_bfloat16() -> None:
    knobs = EngineKnobs(2, ALL)
    exact = built()
    rounded = built(dtype=torch.bfloat16)
    exact.load_state_dict({name: weight.float() for name, weight in rounded.state_dict().items()})
    prompt = PROMPTS[0]
    reference = eager_run(exact, prompt, knobs)[:1]
    eager = eager_run(rounded, prompt, knobs)[:1].float()
    engine = reference_run(fuse_decoder_weights(rounded), prompt, knobs)[:1].float()
    assert (engine - reference).norm() <= 1.5 * (eager - reference).norm()


def test_requests_of_different_lengths_decode_together() -> None:
    """Each as it does alone."""
    model, knobs = built(one_kv_head), EngineKnobs(2, (0, 1, 3))
    decoder = fuse_decoder_weights(model)
    kv_cache = KVCache.allocate(decoder, max_seq_len=8 + STEPS, batch=3)
    prefill, decode = ReferencePrefill(decoder), ReferenceDecode(decoder)
    first = [prefill.prefill(decoder.embedding[ids[0]], knobs, kv_cache, row) for row, ids in enumerate(PROMPTS)]
    kv_cache.set_lengths([8, 3, 1])
    found = [torch.cat(first)]
    kv_cache.next_tokens.copy_(found[0].argmax(dim=-1))
    while len(found) < STEPS:
        found.append(decode.step(knobs, kv_cache))
        kv_cache.note_step()
    assert kv_cache.device_lengths.tolist() == kv_cache.lengths == [13, 8, 6]
    for row, prompt in enumerate(PROMPTS):
        mine = torch.stack([logits[row] for logits in found])
        torch.testing.assert_close(mine, eager_run(model, prompt, knobs), rtol=1e-4, atol=1e-5)


def test_a_step_notes_what_it_chose() -> None:
    """Block 0 keeps the model's own four experts; the last block of a prefill runs for the last position alone."""
    decoder, knobs = fuse_decoder_weights(built()), EngineKnobs(2, (0, 2, 3))
    kv_cache = KVCache.allocate(decoder, max_seq_len=9)
    prefill, decode = ReferencePrefill(decoder), ReferenceDecode(decoder)
    prefill.prefill(decoder.embedding[PROMPTS[0][0]], knobs, kv_cache)
    kv_cache.set_lengths([8])
    decode.step(knobs, kv_cache)
    assert {block: tuple(ids.shape) for block, ids in prefill.topk_expert_ids.items()} == {
        0: (8, 4),
        2: (8, 2),
        3: (1, 2),
    }
    assert {block: tuple(ids.shape) for block, ids in decode.topk_expert_ids.items()} == {
        0: (1, 4),
        2: (1, 2),
        3: (1, 2),
    }
