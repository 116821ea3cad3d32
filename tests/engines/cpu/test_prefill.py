"""The prefill with compiled kernels gives the reference engine's logits, keys and values, and the same experts; of
blocks of other forms, those of float64.
"""

import pytest
import torch

from experiment_core_utils.engines.cpu.prefill import CpuPrefill
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferencePausedPrefill, ReferencePrefill
from experiment_core_utils.engines.select import decoder_engines
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.engines.cpu.block_forms import FORMS, WIDTH, decoder_of_form, in_float64
from tests.engines.cpu_compiler import needs_compiler
from tests.same_floats import assert_same_floats


def decoder_of(kv_heads: int = 2, normalised: bool = False, heads: int = 2) -> DecoderWeights:
    config = tiny_config()
    text = config.text_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads = 64, heads, kv_heads
    text.norm_topk_prob = normalised
    torch.manual_seed(7)
    return fuse_decoder_weights(MolmoeForConditionalGeneration(config).eval())


def run(
    engine: ReferencePrefill, decoder: DecoderWeights, tokens: int, knobs: EngineKnobs
) -> tuple[torch.Tensor, KVCache]:
    """Row 1 of a store of two requests, with more slots than tokens; what is not written stays not-a-number."""
    torch.manual_seed(tokens)
    kv_cache = KVCache.allocate(decoder, max_seq_len=256, batch=2)
    kv_cache.keys.fill_(torch.nan)
    kv_cache.values.fill_(torch.nan)
    engine.warm_up(knobs, kv_cache, tokens)
    return engine.prefill(torch.randn(tokens, 64), knobs, kv_cache, 1).clone(), kv_cache


@needs_compiler
@pytest.mark.parametrize(("kv_heads", "normalised"), [(2, False), (1, True)])
@pytest.mark.parametrize("knobs", [EngineKnobs(4, (0, 1, 2, 3)), EngineKnobs(1, (0, 2, 3)), EngineKnobs(2, (0,))])
def test_it_does_what_the_reference_engine_does(kv_heads: int, normalised: bool, knobs: EngineKnobs) -> None:
    """Prompts of several lengths in the same memory, the longest neither first nor last, and more than one span."""
    decoder = decoder_of(kv_heads, normalised)
    compiled, reference = CpuPrefill(decoder), ReferencePrefill(decoder)
    for tokens in (13, 250, 1, 7):
        found, expected = run(compiled, decoder, tokens, knobs), run(reference, decoder, tokens, knobs)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        for mine, theirs in ((found[1].keys, expected[1].keys), (found[1].values, expected[1].values)):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert compiled.topk_expert_ids.keys() == reference.topk_expert_ids.keys()
        for block, topk_ids in reference.topk_expert_ids.items():
            assert torch.equal(compiled.topk_expert_ids[block], topk_ids)


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 103])
def test_prompts_take_every_form_of_a_block(form: str, tokens: int) -> None:
    """Of one token, and of more than one span; the last block for all of them, and for the last token alone."""
    decoder, knobs = decoder_of_form(form), EngineKnobs(2, (0, 1, 2))
    engine, kv_cache = CpuPrefill(decoder), KVCache.allocate(decoder, tokens + 3)
    embeddings = torch.randn(tokens, WIDTH)
    engine.warm_up(knobs, kv_cache, tokens)
    found, expected = engine.through(embeddings, knobs, kv_cache), in_float64(decoder, embeddings, knobs)
    assert_same_floats(found, expected.states)
    assert_same_floats(kv_cache.keys[:, 0, :, :tokens], expected.keys)
    assert_same_floats(kv_cache.values[:, 0, :, :tokens], expected.values)
    assert engine.topk_expert_ids.keys() == expected.topk_ids.keys()
    for block, ids in expected.topk_ids.items():
        assert torch.equal(engine.topk_expert_ids[block], ids)
    kv_cache.keys.fill_(torch.nan)
    assert_same_floats(engine.prefill(embeddings, knobs, kv_cache), expected.logits[-1:])
    assert_same_floats(kv_cache.keys[:, 0, :, :tokens], expected.keys)
    assert engine.topk_expert_ids.keys() == expected.topk_ids.keys()
    for block, ids in expected.topk_ids.items():
        assert torch.equal(engine.topk_expert_ids[block], ids[-1:] if block == 2 else ids)


@needs_compiler
def test_a_prompt_without_a_slot_for_the_row_behind_it_writes_nothing() -> None:
    decoder, knobs = decoder_of(), EngineKnobs(4, (0, 1))
    split, kv_cache = ReferencePausedPrefill(decoder, CpuPrefill(decoder)), KVCache.allocate(decoder, 64)
    output = "64 tokens and one row do not fit into a KV cache of 64 tokens"
    with pytest.raises(ConfigurationError, match=output):
        split.warm_up(1, knobs, kv_cache, 64)
    with pytest.raises(ConfigurationError, match=output):
        split.begin(torch.randn(64, 64), torch.randn(64), 1, kv_cache)
    assert not kv_cache.keys.any() and not kv_cache.values.any()
    split.begin(torch.randn(63, 64), torch.randn(64), 1, kv_cache)
    assert bool(kv_cache.keys[0].all()) and not kv_cache.keys[1:].any()


@needs_compiler
def test_a_prompt_longer_than_the_store_writes_nothing() -> None:
    decoder = decoder_of()
    output = r"states have to be contiguous float32 \[64, 64\], not torch.float32 \[65, 64\]"
    kv_cache = KVCache.allocate(decoder, 64)
    with pytest.raises(ValueError, match=output):
        CpuPrefill(decoder).prefill(torch.randn(65, 64), EngineKnobs(4, (0, 1)), kv_cache)
    assert not kv_cache.keys.any() and not kv_cache.values.any()


@needs_compiler
def test_it_runs_on_the_cpu_where_it_can() -> None:
    engines = decoder_engines(decoder_of())
    assert isinstance(engines.prefill, CpuPrefill)
    assert engines.reasons["prefill"] == "there are no CUDA graphs on the CPU"


@needs_compiler
def test_a_state_at_a_pause_is_gone_on_from_twice() -> None:
    """The blocks behind the pause leave the states in front of them as they were."""
    decoder = decoder_of()
    kv_cache, knobs = KVCache.allocate(decoder, 64), EngineKnobs(2, (0, 1, 2))
    split = ReferencePausedPrefill(decoder, CpuPrefill(decoder))
    split.warm_up(2, knobs, kv_cache, 20)
    torch.manual_seed(0)
    split.begin(torch.randn(20, 64), None, 2, kv_cache)
    assert_same_floats(split.finish(knobs, kv_cache), split.finish(knobs, kv_cache))


def test_the_reference_engine_runs_where_it_cannot() -> None:
    narrow = decoder_engines(decoder_of(heads=4, kv_heads=4))
    assert type(narrow.prefill) is ReferencePrefill
    assert narrow.reasons["prefill"] == (
        "there are no CUDA graphs on the CPU, and kernels are torch's own: "
        "the attention kernel takes heads in multiples of 8 from 32 on, not 16"
    )
    low = fuse_decoder_weights(MolmoeForConditionalGeneration(tiny_config()).eval().to(torch.bfloat16))
    with pytest.raises(ConfigurationError, match="float32 on the CPU"):
        CpuPrefill(low)
