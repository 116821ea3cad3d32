"""Plain torch on every form of a block beside the modules, several requests of different lengths together."""

import pytest
import torch
from torch.nn import functional as F

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode, ReferencePrefill
from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.described_families import TEXT, WINDOW, text_model
from tests.models.tiny_families import VOCABULARY
from tests.same_floats import assert_same_floats

STEPS = 3


@pytest.mark.parametrize("lengths", [(WINDOW - 2, 2 * WINDOW, 1), (WINDOW + 2, WINDOW + 2), (2 * WINDOW + 1,)])
@pytest.mark.parametrize("name", TEXT)
@torch.inference_mode()
def test_requests_together_are_each_as_by_the_modules(name: str, lengths: tuple[int, ...]) -> None:
    model = text_model(name)
    decoder = fused_decoder(model)
    knobs = EngineKnobs(decoder.default_top_k, tuple(range(len(decoder.blocks))))
    prefill, decode = ReferencePrefill(decoder), ReferenceDecode(decoder)
    kv_cache = KVCache.allocate(decoder, max(lengths) + STEPS, len(lengths))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, VOCABULARY, (length + STEPS,), generator=generator) for length in lengths]
    exact = [model(input_ids=row[None]).logits[0] for row in rows]
    for request, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        logits = prefill.prefill(F.embedding(row[:length], decoder.embedding), knobs, kv_cache, request)
        assert_same_floats(logits[0], exact[request][length - 1])
    kv_cache.set_lengths(lengths)
    decode.warm_up(knobs, kv_cache)
    for step in range(STEPS):
        tokens = [row[length + step] for row, length in zip(rows, lengths, strict=True)]
        kv_cache.next_tokens.copy_(torch.stack(tokens))
        logits = decode.step(knobs, kv_cache)
        kv_cache.note_step()
        for request, length in enumerate(lengths):
            assert_same_floats(logits[request], exact[request][length + step])


def test_a_block_with_a_window_takes_up_no_prompt() -> None:
    decoder = fused_decoder(text_model("mistral"))
    rows, kv_cache = torch.zeros(1, decoder.width), KVCache.allocate(decoder, 8)
    with pytest.raises(ConfigurationError, match="blocks with a sliding window cannot take up a prompt"):
        ReferencePrefill(decoder).suffix_states(rows, rows, 0, 1, kv_cache)
