"""Steps by one compiled call give the reference engine's logits, tokens, keys and values, and note the same experts; of
blocks of other forms, those of float64.
"""

from dataclasses import replace

import pytest
import torch

from experiment_core_utils.engines.cpu.decode import CpuDecode
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode
from experiment_core_utils.engines.select import decoder_engines
from experiment_core_utils.engines.weights import DecoderWeights
from tests.engines.cpu.block_forms import FORMS, decoder_of_form, in_float64
from tests.engines.cpu.test_prefill import decoder_of
from tests.engines.cpu_compiler import needs_compiler
from tests.same_floats import assert_same_floats

pytestmark = needs_compiler


def filled(decoder: DecoderWeights, rows: int, length: int, batch: int = 1) -> KVCache:
    """The first slots of every row; what is not written stays not-a-number."""
    torch.manual_seed(length)
    kv_cache = KVCache.allocate(decoder, 64, batch, rows)
    for kept in (kv_cache.keys, kv_cache.values):
        kept.fill_(torch.nan)
        kept[:, :, :, :length] = torch.randn(kept[:, :, :, :length].shape)
    kv_cache.set_lengths([length] * batch)
    kv_cache.next_tokens.fill_(5)
    return kv_cache


@pytest.mark.parametrize(("heads", "kv_heads", "normalised"), [(2, 2, False), (2, 1, True), (4, 2, False)])
@pytest.mark.parametrize("knobs", [EngineKnobs(4, (0, 1, 2, 3)), EngineKnobs(1, (0, 2, 3)), EngineKnobs(2, (0,))])
@pytest.mark.parametrize("length", [0, 1, 16, 37])
def test_steps_are_those_of_the_reference_engine(
    heads: int, kv_heads: int, normalised: bool, knobs: EngineKnobs, length: int
) -> None:
    """Also with nothing in the store, where a token sees itself alone."""
    decoder = decoder_of(kv_heads, normalised, heads)
    engines = CpuDecode(decoder), ReferenceDecode(decoder)
    kv_caches = [filled(decoder, len(knobs.blocks), length) for _ in engines]
    for _ in range(3):
        found, expected = [engine.step(knobs, kv_cache) for engine, kv_cache in zip(engines, kv_caches, strict=True)]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert kv_caches[0].next_tokens.tolist() == kv_caches[1].next_tokens.tolist()
        assert engines[0].topk_expert_ids.keys() == engines[1].topk_expert_ids.keys()
        for block, topk_ids in engines[1].topk_expert_ids.items():
            assert torch.equal(engines[0].topk_expert_ids[block], topk_ids)
        for kv_cache in kv_caches:
            kv_cache.note_step()
    assert kv_caches[0].device_lengths.tolist() == [length + 3]
    for mine, theirs in ((kv_caches[0].keys, kv_caches[1].keys), (kv_caches[0].values, kv_caches[1].values)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_steps_take_every_form_of_a_block(form: str) -> None:
    """From an empty store, which needs no prefill; more steps than a window is wide, and one block left out."""
    decoder, steps = decoder_of_form(form), 14
    engine = CpuDecode(decoder)
    for knobs in (EngineKnobs(2, (0, 1, 2)), EngineKnobs(4, (0, 2))):
        kv_cache = KVCache.allocate(decoder, steps, blocks=len(knobs.blocks))
        kv_cache.set_lengths([0])
        tokens, logits, topk_ids = [], [], []
        for _ in range(steps):
            tokens.append(kv_cache.next_tokens.clone())
            logits.append(engine.step(knobs, kv_cache))
            topk_ids.append(engine.topk_expert_ids)
            kv_cache.note_step()
        expected = in_float64(decoder, decoder.embedding[torch.cat(tokens)], knobs)
        assert_same_floats(torch.cat(logits), expected.logits)
        assert_same_floats(kv_cache.keys[:, 0], expected.keys)
        assert_same_floats(kv_cache.values[:, 0], expected.values)
        assert topk_ids[-1].keys() == expected.topk_ids.keys()
        for block, ids in expected.topk_ids.items():
            assert torch.equal(torch.cat([step[block] for step in topk_ids]), ids)


def test_several_requests_run_by_the_reference_engine() -> None:
    decoder, knobs = decoder_of(), EngineKnobs(2, (0, 1))
    kv_caches = [filled(decoder, 2, 9, batch=2) for _ in range(2)]
    found, expected = CpuDecode(decoder).step(knobs, kv_caches[0]), ReferenceDecode(decoder).step(knobs, kv_caches[1])
    assert_same_floats(found, expected)
    assert found.shape[0] == 2


def test_it_runs_on_the_cpu_also_with_a_reference_prefill() -> None:
    """For attention in steps, heads may be of any even width."""
    engines = decoder_engines(decoder_of(heads=4, kv_heads=4))
    assert isinstance(engines.decode, CpuDecode)
    assert engines.reasons["decode"] == "there are no CUDA graphs on the CPU"


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    decoder = decoder_of()
    engine, kv_cache = CpuDecode(decoder), filled(decoder, 2, 64)
    before = kv_cache.keys.clone()
    with pytest.raises(ValueError, match="all 64 positions of the KV cache are in use"):
        engine.step(EngineKnobs(4, (0, 1)), kv_cache)
    kv_cache.set_lengths([3])
    with pytest.raises(ValueError, match="keys have to be"):
        engine.step(EngineKnobs(4, (0, 1, 2)), kv_cache)
    with pytest.raises(ValueError, match="experts per token have to be 1 to"):
        engine.step(EngineKnobs(0, (0, 1)), kv_cache)
    halved = replace(kv_cache, keys=kv_cache.keys.half())
    with pytest.raises(ValueError, match="keys have to be contiguous float32 .* not torch.float16"):
        engine.step(EngineKnobs(4, (0, 1)), halved)
    assert torch.equal(kv_cache.keys, before)
    assert kv_cache.next_tokens.tolist() == [5] and kv_cache.device_lengths.tolist() == [3]
