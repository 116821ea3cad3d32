"""What is captured and what is refused. Captures themselves need a GPU; without one those tests are skipped."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.engines.description import DecoderDescription, EngineKnobs
from experiment_core_utils.engines.expert_trace import count_experts
from experiment_core_utils.engines.gpu.decode import (
    GraphedDecode,
    can_share_weights,
    graphed_decode_unsupported_reason,
    shape_unsupported_reason,
)
from experiment_core_utils.engines.gpu.prefill import graphed_prefill_unsupported_reason
from experiment_core_utils.engines.gpu.triton.tuning import TUNINGS, prefill_tiles_for, tiles_for
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.reference.decoder import ReferenceDecode
from experiment_core_utils.engines.weights import BlockWeights, DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.same_floats import assert_same_floats

FEWEST_TOGETHER = TUNINGS["H200"].fewest_together

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
KNOBS = EngineKnobs(3, (0, 1, 3))


def tiny_model(device: str) -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    return MolmoeForConditionalGeneration(tiny_config()).eval().to(device)


def fused(device: str = "cpu") -> DecoderWeights:
    return fuse_decoder_weights(tiny_model(device))


def test_on_the_cpu_nothing_is_captured() -> None:
    decoder = fused()
    assert graphed_decode_unsupported_reason(decoder) == "CUDA graphs need a GPU, and the model is on cpu"
    with pytest.raises(ConfigurationError, match="the model is on cpu"):
        GraphedDecode(decoder)


@dataclass(frozen=True)
class OnAGpu(DecoderWeights):
    """Weights that say they are on one."""

    device = torch.device("cuda")


def test_torch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls AMD's GPUs cuda, too; each engine says why it does not run there, and the whole choice as well."""
    on_the_cpu = fused()
    decoder = OnAGpu(**{each.name: getattr(on_the_cpu, each.name) for each in fields(on_the_cpu)})
    assert graphed_decode_unsupported_reason(decoder) is None
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    reason = "its kernels are for CUDA, and this torch is built for ROCm 6.4.0"
    assert graphed_decode_unsupported_reason(decoder) == graphed_prefill_unsupported_reason(decoder) == reason
    with pytest.raises(ConfigurationError, match=f"the decode step cannot be captured: {reason}"):
        GraphedDecode(decoder)


def test_shapes_that_the_kernels_do_not_cover() -> None:
    decoder = fused()
    assert shape_unsupported_reason(decoder) is None
    assert (
        shape_unsupported_reason(replace(decoder, head_width=25))
        == "the kernels turn the halves of a head, which 25 values do not have"
    )
    assert shape_unsupported_reason(replace(decoder, num_experts=513)) == "the kernels rank up to 512 experts, not 513"
    assert (
        shape_unsupported_reason(replace(decoder, width=16385))
        == "the kernels take rows of up to 16384 values, not 16385"
    )
    assert (
        shape_unsupported_reason(replace(decoder, num_heads=65, head_width=256))
        == "the kernels take rows of up to 16384 values, not 16640"
    )
    assert shape_unsupported_reason(replace(decoder, num_experts=512, width=16384, expert_width=53248)) is None
    double = replace(decoder, head=decoder.head.double())
    assert shape_unsupported_reason(double) == "the kernels take bfloat16, float16 and float32, not float64"
    blocks = tuple(replace(block, post_ffn_norm=block.ffn_norm) for block in decoder.blocks)
    behind = shape_unsupported_reason(replace(decoder, blocks=blocks))
    assert behind == "the kernels of a GPU compute norms behind a block's parts where dense blocks have no others"


# From their public configs: hidden width, heads, key heads, head width, experts, inner width; then whether queries and
# keys have norms, and whether there are biases.
PUBLIC_SHAPES = {
    "Llama-3.2-1B": (2048, 32, 8, 64, 1, 8192, False, False),
    "Qwen3-8B": (4096, 32, 8, 128, 1, 12288, True, False),
    "Qwen3-14B": (5120, 40, 8, 128, 1, 17408, True, False),
    "Qwen3-32B": (5120, 64, 8, 128, 1, 25600, True, False),
    "Qwen3-VL-32B": (5120, 64, 8, 128, 1, 25600, True, False),
    "Mistral-Small-24B": (5120, 32, 8, 128, 1, 32768, False, False),
    "Llama-3.3-70B": (8192, 64, 8, 128, 1, 28672, False, False),
    "Qwen2.5-VL-72B": (8192, 64, 8, 128, 1, 29568, False, True),
    "Qwen3-30B-A3B": (2048, 32, 4, 128, 128, 768, True, False),
    "Qwen3-235B-A22B": (4096, 64, 4, 128, 128, 1536, True, False),
    "Mixtral-8x7B": (4096, 32, 8, 128, 8, 14336, False, False),
    "Mixtral-8x22B": (6144, 48, 8, 128, 8, 16384, False, False),
    "heads of 80, as in Phi-2": (2560, 32, 32, 80, 1, 10240, False, True),
}


def decoder_of_shape(
    width: int, heads: int, kv_heads: int, head_width: int, experts: int, inner: int, normed: bool, biased: bool
) -> DecoderWeights:
    """One block and 1,000 tokens, without memory."""

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="meta")

    norm, joint = empty(head_width) if normed else None, (heads + 2 * kv_heads) * head_width
    block = BlockWeights(
        input_norm=empty(width),
        qkv=empty(joint, width),
        query_norm=norm,
        key_norm=norm,
        output=empty(width, heads * head_width),
        ffn_norm=empty(width),
        router=empty(experts, width) if experts > 1 else None,
        gate_up=empty(experts, 2 * inner, width),
        down=empty(experts, width, inner),
        qkv_bias=empty(joint) if biased else None,
    )
    sizes = DecoderDescription(width, heads, kv_heads, head_width, experts, inner, 1000, 1e-5, 1, True)
    return DecoderWeights.of(
        sizes,
        blocks=(block,),
        embedding=empty(1000, width),
        final_norm=empty(width),
        head=empty(1000, width),
        inverse_frequencies=torch.empty(head_width // 2, device="meta"),
    )


@pytest.mark.parametrize("shape", PUBLIC_SHAPES)
def test_public_shapes_are_covered(shape: str) -> None:
    """Each of their sizes has tiles, which divide what they have to."""
    decoder = decoder_of_shape(*PUBLIC_SHAPES[shape])
    assert shape_unsupported_reason(decoder) is None
    tiles = tiles_for(decoder, 8, 4096)
    # Not more warps for a row than before up to 8,192 values.
    assert (tiles.qkv.warps, tiles.output.warps, tiles.head.warps) == (4, 4, 8)
    for tile, (outer, inner) in zip(
        prefill_tiles_for(decoder.width, decoder.expert_width, decoder.head),
        ((decoder.expert_width, decoder.width), (decoder.width, decoder.expert_width)),
        strict=True,
    ):
        assert outer % tile.strip == inner % tile.step == 0


def test_odd_widths_do_not_share_weights() -> None:
    decoder = fused()
    assert can_share_weights(decoder)
    assert not can_share_weights(replace(decoder, expert_width=24))
    assert not can_share_weights(replace(decoder, width=40))
    for other in ({"router": None}, {"window": 4}, {"has_rope": False}, {"qkv_bias": torch.zeros(1)}):
        blocks = (*decoder.blocks[:-1], replace(decoder.blocks[-1], **other))
        assert not can_share_weights(replace(decoder, blocks=blocks))


@needs_gpu
def test_replays_give_the_modules_tokens() -> None:
    model = tiny_model("cuda")
    decoder = fuse_decoder_weights(model)
    kv_cache, graphed = KVCache.allocate(decoder, 32), GraphedDecode(decoder)
    with torch.inference_mode():
        ids = torch.arange(7, 20, device="cuda")[None]
        for top_k in (3, 1):
            knobs = EngineKnobs(top_k, (0, 1, 3))
            graphed.warm_up(knobs, kv_cache)
            logits, state = model.prefill(ids, top_k=top_k, active_blocks=knobs.blocks)
            for row, layer in enumerate(state.past_key_values.layers):
                kv_cache.keys[row, :, :, :13], kv_cache.values[row, :, :, :13] = layer.keys, layer.values
            token = logits.argmax(dim=-1, keepdim=True)
            kv_cache.set_lengths([13])
            kv_cache.next_tokens.copy_(token[0])
            for _ in range(6):
                logits = graphed.step(knobs, kv_cache)
                expected = model.decode_step(token, state)
                token = expected.argmax(dim=-1, keepdim=True)
                assert torch.allclose(logits, expected, atol=1e-4)
                assert kv_cache.next_tokens.tolist() == token[0].tolist()
            assert kv_cache.device_lengths.tolist() == [19]


def filled_kv_caches(decoder: DecoderWeights, batch: int, max_seq_len: int) -> tuple[KVCache, KVCache]:
    """Two with the same keys and values at random."""
    kv_caches = KVCache.allocate(decoder, max_seq_len, batch), KVCache.allocate(decoder, max_seq_len, batch)
    for place in ("keys", "values"):
        getattr(kv_caches[0], place).normal_()
        getattr(kv_caches[1], place).copy_(getattr(kv_caches[0], place))
    return kv_caches


def begun(kv_caches: tuple[KVCache, KVCache]) -> None:
    """Requests of 1 to 9 positions, each with another last token."""
    for kv_cache in kv_caches:
        kv_cache.set_lengths([1 + 4 * request % 9 for request in range(kv_cache.batch)])
        kv_cache.next_tokens.copy_(torch.arange(7, 7 + kv_cache.batch))


@needs_gpu
@pytest.mark.parametrize(
    ("batch", "fewest"),
    [(FEWEST_TOGETHER - 1, FEWEST_TOGETHER), (1, 1), (3, 2), (16, 2), (33, FEWEST_TOGETHER), (70, FEWEST_TOGETHER)],
)
def test_requests_of_several_lengths_get_the_tokens_of_the_reference_step(batch: int, fewest: int) -> None:
    """Also where all have all experts, and where each has one."""
    decoder = fused("cuda")
    kv_cache, other = filled_kv_caches(decoder, batch, 16)
    graphed, reference = GraphedDecode(decoder, fewest_together=fewest), ReferenceDecode(decoder)
    for knobs in (KNOBS, EngineKnobs(8, (0, 1, 2, 3)), EngineKnobs(1, (0, 2))):
        begun((kv_cache, other))
        for _ in range(3):
            logits = graphed.step(knobs, kv_cache)
            assert torch.allclose(logits, reference.step(knobs, other), atol=1e-4)
            assert kv_cache.next_tokens.tolist() == other.next_tokens.tolist()
            other.note_step()
        assert kv_cache.device_lengths.tolist() == other.lengths
    assert torch.allclose(kv_cache.keys, other.keys, atol=1e-4)
    assert torch.allclose(kv_cache.values, other.values, atol=1e-4)


@needs_gpu
def test_in_bfloat16_requests_together_are_as_near_as_the_reference_step() -> None:
    exact = fused("cuda")
    decoder = fuse_decoder_weights(tiny_model("cuda").bfloat16())
    kv_caches = filled_kv_caches(decoder, 8, 16)
    wanted = KVCache.allocate(exact, 16, 8)
    wanted.keys.copy_(kv_caches[0].keys)
    wanted.values.copy_(kv_caches[0].values)
    begun((wanted, wanted))
    begun(kv_caches)
    logits = ReferenceDecode(exact).step(KNOBS, wanted)
    found = GraphedDecode(decoder).step(KNOBS, kv_caches[0]), ReferenceDecode(decoder).step(KNOBS, kv_caches[1])
    ours, reference = ((each.float() - logits).norm(dim=1).median() / logits.norm(dim=1).median() for each in found)
    assert ours < 1.2 * reference < 0.1


@needs_gpu
@pytest.mark.parametrize("batch", [1, 2, FEWEST_TOGETHER, 20])
def test_replays_note_the_experts_of_the_reference_step(batch: int) -> None:
    """Also where a setting before took more experts and blocks, and where more are requested than the model's own 4."""
    decoder = fused("cuda")
    kv_cache, other = filled_kv_caches(decoder, batch, 16)
    graphed, reference = GraphedDecode(decoder), ReferenceDecode(decoder)
    assert graphed.topk_expert_ids == {}
    for knobs in (EngineKnobs(6, (0, 1, 2, 3)), KNOBS, EngineKnobs(1, (2,))):
        begun((kv_cache, other))
        graphed.warm_up(knobs, kv_cache)
        graphed.forget_experts()
        assert graphed.topk_expert_ids == {}
        graphed.step(knobs, kv_cache)
        reference.step(knobs, other)
        expected = {block: ids.sort(dim=1).values.tolist() for block, ids in reference.topk_expert_ids.items()}
        assert {block: ids.sort(dim=1).values.tolist() for block, ids in graphed.topk_expert_ids.items()} == expected
        assert tuple(expected) == knobs.blocks
        found = count_experts("decode", graphed.topk_expert_ids, decoder, knobs)
        assert found == tuple(knobs.top_k if block else 4 for block in knobs.blocks)


@needs_gpu
@pytest.mark.parametrize("batch", [1, FEWEST_TOGETHER])
def test_making_ready_leaves_a_full_store_as_it_was(batch: int) -> None:
    decoder = fused("cuda")
    kv_cache, _ = filled_kv_caches(decoder, batch, 8)
    kv_cache.set_lengths([8] * batch)
    kv_cache.next_tokens.fill_(5)
    before = [kv_cache.keys.clone(), kv_cache.values.clone()]
    GraphedDecode(decoder).warm_up(KNOBS, kv_cache)
    assert kv_cache.device_lengths.tolist() == [8] * batch and kv_cache.next_tokens.tolist() == [5] * batch
    assert torch.equal(kv_cache.keys, before[0]) and torch.equal(kv_cache.values, before[1])


@needs_gpu
def test_beyond_the_limit_the_oldest_graph_is_captured_anew() -> None:
    decoder = fused("cuda")
    kv_cache, graphed = KVCache.allocate(decoder, 8), GraphedDecode(decoder, CudaGraphPool(2))
    seen = []
    for top_k in (1, 2, 3, 1):
        kv_cache.set_lengths([2])
        kv_cache.next_tokens.fill_(7)
        seen.append(graphed.step(EngineKnobs(top_k, (0, 1)), kv_cache).clone())
    assert_same_floats(seen[0], seen[3])
    assert not torch.allclose(seen[0], seen[1], atol=1e-2)
