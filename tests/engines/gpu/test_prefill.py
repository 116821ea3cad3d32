"""A captured prefill gives the modules' logits, keys and values; without a GPU it says why there is none."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import count_experts
from experiment_core_utils.engines.gpu.prefill import (
    GraphedPrefill,
    PaddedPrompt,
    PromptBuffers,
    graphed_prefill_unsupported_reason,
)
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferencePrefill
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.same_floats import assert_same_floats

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model_on(device: str) -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(tiny_config()).eval().to(device)


@pytest.fixture(scope="module")
def on_the_cpu() -> DecoderWeights:
    return fuse_decoder_weights(model_on("cpu"))


def test_without_a_gpu_the_reason_says_so(on_the_cpu: DecoderWeights) -> None:
    assert graphed_prefill_unsupported_reason(on_the_cpu) == "its weights are on cpu, not on a CUDA device"
    with pytest.raises(ConfigurationError, match="the prefill cannot be captured: its weights are on cpu"):
        GraphedPrefill(on_the_cpu)


def buffers_of(width: int, device: str) -> PromptBuffers:
    decoder: Any = SimpleNamespace(width=width, dtype=torch.bfloat16, device=torch.device(device))
    factors = partial(torch.ones, device=device)
    return PromptBuffers(decoder, lambda rows: (factors(rows, 64), factors(rows, 64)))


def bytes_of(prompts: Iterable[PaddedPrompt]) -> int:
    """Of each piece of memory once."""
    tensors = [tensor for each in prompts for tensor in (each.hidden, *each.rotary, *each.added)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for each in storages.values())


def test_buffers_of_prompts_of_all_lengths_are_bounded() -> None:
    """Qwen3-VL-8B: states of 4,096 numbers, and three to add; a buffer for each length would take 17 GB."""
    buffers, added = buffers_of(4096, "meta"), [torch.zeros(1, 4096, dtype=torch.bfloat16, device="meta")] * 3
    prompts = [buffers.of(padded) for padded in range(64, 8192 + 1, 64)]
    for prompt in prompts:
        assert [len(each) for each in prompt.load_added(added)] == [len(prompt.hidden)] * 3
    a_token = 4 * 4096 * 2 + 2 * 64 * 4
    # 64, 128, ... 8192 tokens.
    assert bytes_of(prompts) == (2 * 8192 - 64) * a_token < 600e6


def test_a_prompt_has_its_own_tokens_and_zeros_behind_them_after_one_of_another_length() -> None:
    buffers = buffers_of(2, "cpu")
    long, short = buffers.of(256), buffers.of(192)
    long.load(torch.ones(250, 2))
    assert long.length.item() == 250 and short.length.item() == 1
    short.load(2 * torch.ones(3, 2), appended=3 * torch.ones(2))
    assert short.length.item() == 4 and short.hidden.shape == (192, 2)
    assert short.hidden[:5, 0].tolist() == [2, 2, 2, 3, 0] and not short.hidden[5:].any()
    (states,) = short.load_added([torch.ones(3, 2)])
    assert states.shape == (192, 2) and states.sum() == 6
    (longer,) = long.load_added([torch.ones(256, 2)])
    assert longer.shape == (256, 2) and longer.sum() == 512


@needs_a_gpu
def test_odd_widths_are_named() -> None:
    decoder = fuse_decoder_weights(model_on("cuda"))
    assert (
        graphed_prefill_unsupported_reason(replace(decoder, head_width=25))
        == "its heads are 25 wide, which has no halves to turn"
    )
    reason = graphed_prefill_unsupported_reason(replace(decoder, expert_width=12))
    assert reason == "its experts' width is 12, not a multiple of 16"


@needs_a_gpu
@pytest.mark.parametrize("knobs", [EngineKnobs(4, (0, 1, 2, 3)), EngineKnobs(1, (0, 2)), EngineKnobs(3, (0,))])
@pytest.mark.parametrize("tokens", [1, 64, 70])
def test_logits_keys_and_values_are_those_of_the_modules(knobs: EngineKnobs, tokens: int) -> None:
    model = model_on("cuda")
    decoder = fuse_decoder_weights(model)
    engine, kv_cache = GraphedPrefill(decoder), KVCache.allocate(decoder, 100)
    engine.warm_up(knobs, kv_cache, tokens)
    for seed in range(2):
        torch.manual_seed(seed)
        ids = torch.randint(0, 100, (1, tokens), device="cuda")
        with torch.inference_mode():
            wanted, state = model.prefill(ids, top_k=knobs.top_k, active_blocks=knobs.blocks)
        logits = engine.prefill(decoder.embedding[ids[0]], knobs, kv_cache)
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert kv_cache.next_tokens.tolist() == [int(wanted.argmax())]
        for position, layer in enumerate(state.past_key_values.layers):
            torch.testing.assert_close(kv_cache.keys[position, :, :, :tokens], layer.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kv_cache.values[position, :, :, :tokens], layer.values, rtol=1e-4, atol=1e-4)


def test_float32_off_tensor_cores_is_multiplied_as_it_is() -> None:
    pytest.importorskip("triton")
    from experiment_core_utils.engines.gpu.triton.grouped_gemm import dot_precision

    assert (dot_precision(torch.zeros(1)), dot_precision(torch.zeros(1, dtype=torch.bfloat16))) == ("ieee", "tf32")


@needs_a_gpu
def test_experts_in_float32_are_as_near_to_float64_as_float32_is() -> None:
    """Of one expert a token, at widths where sums are long. One tf32 product alone is off by 2e-3."""
    from experiment_core_utils.engines.gpu.triton.grouped_gemm import expert_rows

    torch.manual_seed(3)
    rows, gate_up, down = (
        torch.randn(shape, device="cuda") for shape in ((256, 2048), (8, 2048, 2048), (8, 2048, 1024))
    )
    chosen = torch.randint(0, 8, (256, 1), device="cuda", dtype=torch.int32)
    found = expert_rows(rows, gate_up, down, chosen)
    for expert in range(8):
        own = chosen[:, 0] == expert
        gate, up = (rows[own].double() @ gate_up[expert].double().t()).chunk(2, dim=1)
        wanted = (torch.nn.functional.silu(gate) * up) @ down[expert].double().t()
        assert float((found[own] - wanted).norm() / wanted.norm()) < 2e-6


@needs_a_gpu
def test_a_short_prompt_is_made_ready_after_a_long_one() -> None:
    decoder = fuse_decoder_weights(model_on("cuda"))
    engine, kv_cache = GraphedPrefill(decoder), KVCache.allocate(decoder, 40_000)
    engine.prefill(decoder.embedding[torch.zeros(40_000, dtype=torch.long)], EngineKnobs(4, (0,)), kv_cache)
    knobs = EngineKnobs(1, (0, 1))
    engine.warm_up(knobs, kv_cache, 5)
    short = engine.prefill(decoder.embedding[:5], knobs, kv_cache).clone()
    alone = GraphedPrefill(decoder).prefill(decoder.embedding[:5], knobs, kv_cache)
    assert_same_floats(short, alone)


@needs_a_gpu
@pytest.mark.parametrize("tokens", [1, 64, 70])
def test_replays_note_the_experts_of_the_reference_prefill(tokens: int) -> None:
    """Without the padding, and of the last block the last position alone.

    Also where a setting before took more, and where more are requested than the model's 4.
    """
    decoder = fuse_decoder_weights(model_on("cuda"))
    engine, kv_cache = GraphedPrefill(decoder), KVCache.allocate(decoder, 100)
    reference, other = ReferencePrefill(decoder), KVCache.allocate(decoder, 100)
    torch.manual_seed(1)
    embeddings = decoder.embedding[torch.randint(0, 100, (tokens,), device="cuda")]
    assert engine.topk_expert_ids == {}
    for knobs in (EngineKnobs(6, (0, 1, 2, 3)), EngineKnobs(3, (0, 2)), EngineKnobs(1, (1,))):
        engine.warm_up(knobs, kv_cache, tokens)
        engine.forget_experts()
        assert engine.topk_expert_ids == {}
        engine.prefill(embeddings, knobs, kv_cache)
        reference.prefill(embeddings, knobs, other)
        expected = {block: ids.sort(dim=1).values.tolist() for block, ids in reference.topk_expert_ids.items()}
        assert {block: ids.sort(dim=1).values.tolist() for block, ids in engine.topk_expert_ids.items()} == expected
        assert tuple(expected) == knobs.blocks
        assert [len(ids) for ids in expected.values()] == [tokens] * (len(expected) - 1) + [1]
        found = count_experts("prefill", engine.topk_expert_ids, decoder, knobs)
        assert found == tuple(knobs.top_k if block else 4 for block in knobs.blocks)


@needs_a_gpu
def test_a_request_of_several_fills_its_own_slots() -> None:
    model = model_on("cuda")
    decoder = fuse_decoder_weights(model)
    engine, kv_cache = GraphedPrefill(decoder), KVCache.allocate(decoder, 80, batch=2)
    engine.prefill(decoder.embedding[:9], EngineKnobs(4, (0, 1)), kv_cache, request=1)
    assert not kv_cache.keys[:, 0].any()
    assert not kv_cache.keys[2:].any()
    assert bool(kv_cache.keys[:2, 1, :, :9].any())


@needs_a_gpu
def test_a_prompt_longer_than_the_store_is_refused() -> None:
    decoder = fuse_decoder_weights(model_on("cuda"))
    with pytest.raises(ConfigurationError, match="81 tokens does not fit into a KV cache of 80 tokens"):
        GraphedPrefill(decoder).warm_up(EngineKnobs(4, (0,)), KVCache.allocate(decoder, 80), 81)
