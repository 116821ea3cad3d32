"""Which decoders are described, with what, and the reason where one is not."""

import pytest
import torch
from torch import nn

from experiment_core_utils.models.hf.decoder_description import fused_decoder
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.depth_families import LISTED, WHOLE, built
from tests.models.described_families import WINDOW, text_model
from tests.models.knob_families import TEXT_FAMILIES, VISION_FAMILIES
from tests.models.tiny_families import TEXT_FAMILIES as TINY
from tests.models.tiny_families import build, config_class

REFUSED = {
    "starcoder2": "the output of its attention has a bias",
    "gpt_oss": "its attention has sinks",
    "deepseek_v3": "its attention has kv_a_layernorm, kv_a_proj_with_mqa, kv_b_proj",
    "gemma2": "its config has attn_logit_softcapping 50.0",
    "gemma3": "its blocks have rotary positions of several kinds",
    # Blocks without a window have no rotary positions, which no part of a block says.
    "exaone4": "its blocks compute something else than their parts say",
    "cohere2": "its config has logit_scale 0.0625",
    "diffllama": "its attention has groupnorm, lambda_q1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_with_its_reason(name: str) -> None:
    make = LISTED.get(name) or (WHOLE[name][0] if name in WHOLE else TINY[name])
    model = built(make)
    with pytest.raises(ConfigurationError, match=f"^engines do not know its decoder: {REFUSED[name]}"):
        fused_decoder(model)


def test_positions_in_pairs_are_seen_by_what_they_give() -> None:
    """Ernie 4.5 has all parts of a Llama and turns neighbouring values together."""
    config = config_class("Ernie4_5Config")(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3},
    )
    with pytest.raises(ConfigurationError, match="its blocks compute something else than their parts say"):
        fused_decoder(build(config))  # type: ignore[arg-type]


def test_the_parts_of_each_block() -> None:
    """Of Qwen2-MoE's 4 blocks every second has experts; all have biases, none norms of heads."""
    decoder = fused_decoder(text_model("qwen2_moe, every second"))
    assert [block.router is None for block in decoder.blocks] == [True, False, True, False]
    assert (decoder.routed_blocks, decoder.default_top_k, decoder.num_experts) == ((1, 3), 3, 6)
    assert [decoder.experts_of(index, 5) for index in range(4)] == [1, 3, 1, 5]
    dense, routed = decoder.blocks[:2]
    # 6 query and 3 key heads of 10; 44 inner values of a dense block, 12 of an expert, 20 of the shared one.
    assert dense.qkv.shape == (120, 36) and dense.qkv_bias is not None and dense.qkv_bias.shape == (120,)
    assert dense.query_norm is None and dense.gate_up.shape == (1, 88, 36) and dense.down.shape == (1, 36, 44)
    assert routed.gate_up.shape == (6, 24, 36) and routed.shared_gate_up is not None and routed.shared_gate is not None
    assert (routed.shared_gate_up.shape, routed.shared_gate.shape) == ((40, 36), (1, 36))


def test_windows_norms_positions_and_scales() -> None:
    assert [block.window for block in fused_decoder(text_model("ministral")).blocks] == [WINDOW, None, WINDOW, None]
    assert [block.has_rope for block in fused_decoder(text_model("smollm3")).blocks] == [True, True, False, True]
    after = fused_decoder(text_model("olmo2")).blocks[0]
    assert after.input_norm is None and after.ffn_norm is None and after.post_ffn_norm is not None
    assert after.query_norm is not None and after.query_norm.shape == (192,)
    of_heads = fused_decoder(text_model("qwen3")).blocks[0].key_norm
    assert of_heads is not None and of_heads.shape == (32,)
    # 0.1 * ln(factor of 4) + 1
    assert fused_decoder(text_model("llama, yarn")).rotary_scale == pytest.approx(1.1386294)
    routed = ("olmoe", "olmoe, weights that sum to 1", "mixtral", "qwen2_moe")
    assert [fused_decoder(text_model(name)).normalise_top_k for name in routed] == [False, True, True, False]


def test_nothing_is_stored_twice() -> None:
    """What is fused is what the modules read."""
    model = text_model("mixtral")
    decoder = fused_decoder(model)
    block, fused = model.model.layers[1], decoder.blocks[1]
    assert fused.qkv.untyped_storage().data_ptr() == block.self_attn.k_proj.weight.untyped_storage().data_ptr()
    assert fused.gate_up.data_ptr() == block.mlp.experts.gate_up_proj.data_ptr()
    with torch.no_grad():
        fused.qkv[-1] = 7.0
    assert bool((block.self_attn.v_proj.weight[-1] == 7.0).all())


def test_other_layers_and_routers_are_refused() -> None:
    adapted = text_model("llama")
    adapted.model.layers[2].mlp.up_proj = nn.Sequential(adapted.model.layers[2].mlp.up_proj)
    with pytest.raises(ConfigurationError, match="its MLP lacks gate_proj, up_proj or down_proj"):
        fused_decoder(adapted)
    hooked = text_model("llama")
    hooked.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigurationError, match="layers.1.mlp has hooks or a forward of its own"):
        fused_decoder(hooked)
    uneven = TEXT_FAMILIES["olmoe"].built()
    uneven.model.layers[1].mlp.gate.top_k = 1
    with pytest.raises(ConfigurationError, match="its blocks choose different numbers of experts"):
        fused_decoder(uneven)
    with pytest.raises(ConfigurationError, match="its MLP has shared_experts"):
        fused_decoder(VISION_FAMILIES["glm4v_moe"].built())
