"""Which vision towers are described, with what, and the reason where one is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from experiment_core_utils.models.hf.tower_description import described_tower
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.engines.cpu_compiler import needs_compiler
from tests.models.described_families import pictured
from tests.models.described_towers import HEAD_WIDTH, HEADS, INNER, TOWERS, pictures, towered
from tests.models.tiny_families import CROP_FAMILIES, build, config_class

SIGLIP = ("llava, siglip", "smolvlm", "idefics3")
NO_LIST = "it has no encoder with a list of blocks named layers"


@needs_compiler
@pytest.mark.parametrize("name", TOWERS)
def test_the_blocks_of_a_tower(name: str) -> None:
    """3 blocks of 3 heads; what is fused is what the modules read."""
    model = towered(name)
    layers, engine = described_tower(model)
    assert len(layers) == len(engine.kernels) == 3
    block, layer, width = engine.kernels[1].block, layers[1], HEADS * HEAD_WIDTH
    assert (block.qkv.shape, block.inner.shape) == ((3 * width, width), (INNER, width))
    assert block.activation == (
        "quick_gelu" if name in ("llava", "llava, two feature layers", "llava_next") else "tanh_gelu"
    )
    attention: Any = layer.self_attn
    assert block.qkv.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    torch.testing.assert_close(block.qkv_bias[width : 2 * width], attention.k_proj.bias, rtol=0, atol=0)


@needs_compiler
def test_a_gelu_is_told_from_its_approximations() -> None:
    assert described_tower(towered("llava", hidden_act="gelu"))[1].kernels[0].block.activation == "gelu"
    with pytest.raises(
        ConfigurationError, match="its activation ClippedGELUActivation is none of quick_gelu, gelu"
    ):
        described_tower(towered("llava", hidden_act="gelu_10"))
    with pytest.raises(ConfigurationError, match="its activation ReLU is none of"):
        described_tower(towered("llava", hidden_act="relu"))


@pytest.mark.parametrize("name", ["pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "internvl"])
def test_what_is_not_known_is_refused_with_its_reason(name: str) -> None:
    """Rotary positions, windows and layer scales have other names; a text model has no tower."""
    model, _ = pictured(name)
    with pytest.raises(ConfigurationError, match=f"^engines do not know its vision tower: {NO_LIST}$"):
        described_tower(model)


def test_a_text_model_has_no_tower() -> None:
    with pytest.raises(ConfigurationError, match="it is none of vision_tower, vision_model, visual"):
        described_tower(build(config_class("LlamaConfig")(vocab_size=9, hidden_size=8, num_attention_heads=2)))  # type: ignore[arg-type]


def test_narrow_heads_have_no_kernel() -> None:
    with pytest.raises(ConfigurationError, match="heads in multiples of 8 from 32 on, not 10"):
        described_tower(build(CROP_FAMILIES["llava"]()))  # type: ignore[arg-type]


def _scaled(block: Any) -> None:
    block.layer_scale1 = nn.Parameter(torch.ones(120))


def _no_bias(block: Any) -> None:
    block.self_attn.k_proj.bias = None


def _other_scale(block: Any) -> None:
    block.self_attn.scale = 0.1


def _rms(block: Any) -> None:
    block.layer_norm2 = nn.RMSNorm(120)


def _hooked(block: Any) -> None:
    block.mlp.register_forward_hook(lambda *_: None)


def _number(block: Any) -> None:
    block.residual_factor = 0.7


def _half(block: Any) -> None:
    block.mlp.fc2.half()


def _normed_last(block: Any) -> None:
    """The parts of a block of the known form, used once more."""

    def forward(own: Any, *given: Any, **more: Any) -> torch.Tensor:
        states: torch.Tensor = own.layer_norm1(plain(own, *given, **more))
        return states

    plain = type(block).forward
    block.__class__ = type("NormedLast", (type(block),), {"forward": forward})


CHANGES: dict[str, Callable[[Any], None]] = {
    "a block has layer_scale1": _scaled,
    "a linear layer has no bias": _no_bias,
    "its attention scales scores by another factor": _other_scale,
    "its norm is a RMSNorm": _rms,
    "mlp has hooks or a forward of its own": _hooked,
    r"a block has a number residual_factor \(0.7\)": _number,
    r"its weights are in several dtypes \(float16, float32\)": _half,
    r"its blocks compute something else than their parts say \(relative difference": _normed_last,
}


@needs_compiler
@pytest.mark.parametrize("reason", CHANGES)
def test_another_block_is_refused(reason: str) -> None:
    """The second of three blocks differs."""
    model = towered("llava")
    CHANGES[reason](model.model.vision_tower.encoder.layers[1])
    with pytest.raises(ConfigurationError, match=f"^engines do not know its vision tower: {reason}"):
        described_tower(model)


@needs_compiler
def test_a_model_that_has_encoded_pictures_is_described() -> None:
    """transformers' own hooks, which note states, are there from then on."""
    model = towered("llava")
    with torch.inference_mode():
        model.model.get_image_features(**pictures("llava", 1))
    assert model.model.vision_tower.encoder.layers[0]._forward_hooks
    assert len(described_tower(model)[0]) == 3
