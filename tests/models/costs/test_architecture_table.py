"""What the table of architectures refuses, and what it does not look at."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, LlavaConfig, MixtralConfig, Qwen2Config, SiglipVisionConfig, ViTConfig

from experiment_core_utils.models.costs.architecture import shapes_of
from experiment_core_utils.models.costs.decoder_table import NotInTable, decoder_of
from experiment_core_utils.models.costs.vision_table import CropVision, PatchVision, SizedCropVision
from tests.models.tiny_families import CROP_FAMILIES, PATCH_FAMILIES, TEXT_FAMILIES, config_class


def llava(**parts: Any) -> LlavaConfig:
    whole = {"text_config": LlamaConfig(), "vision_config": SiglipVisionConfig(), **parts}
    return LlavaConfig(**whole)


def internvl(**chosen: Any) -> Any:
    return config_class("InternVLConfig")(**chosen)


def test_kinds_of_vision() -> None:
    assert shapes_of(TEXT_FAMILIES["llama"]())[1] is None
    assert isinstance(shapes_of(CROP_FAMILIES["llava"]())[1], CropVision)
    assert isinstance(shapes_of(CROP_FAMILIES["aria"]())[1], SizedCropVision)
    assert isinstance(shapes_of(PATCH_FAMILIES["qwen3_vl"]())[1], PatchVision)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config, "'gpt2'.*formulas for aria, aria_text, deepseek_v3, .*llama, llava, llava_next"),
        (lambda: llava(text_config=GPT2Config()), "'gpt2'"),
        (lambda: llava(vision_config=ViTConfig()), "'vit'.*clip_vision_model, siglip_vision_model"),
        (lambda: llava(vision_config=SiglipVisionConfig(patch_size=[16, 14])), "patch_size .*16, 14"),
        (lambda: internvl(downsample_ratio=0.3), "internvl_vision with 1024 patches, of which 9"),
        (lambda: internvl(vision_feature_select_strategy="full"), "vision_feature_select_strategy 'full'"),
        (
            lambda: Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]),
            "chunked_attention in block 1",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: Callable[[], Any], named: str) -> None:
    with pytest.raises(NotInTable, match=named):
        shapes_of(config())


def test_blocks_that_differ_in_size_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    if not hasattr(config, "is_heterogeneous"):
        pytest.skip("this version of transformers has no such models")
    with pytest.raises(NotInTable, match="differ"):
        shapes_of(LlamaConfig(num_hidden_layers=2, per_layer_config={1: {"intermediate_size": 64}}))


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_quantisation_changes_nothing(name: str) -> None:
    plain, packed = TEXT_FAMILIES[name](), TEXT_FAMILIES[name]()
    packed.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    packed.dtype = "float16"
    assert shapes_of(packed) == shapes_of(plain)


@pytest.mark.parametrize("name", ["num_experts_per_tok", "intermediate_size", "num_key_value_heads", "sliding_window"])
def test_a_number_that_a_config_gives_by_block_has_no_formula(name: str) -> None:
    config = MixtralConfig(num_hidden_layers=2)
    vars(config)[name] = [2, 4]
    with pytest.raises(NotInTable, match=f"the config of this mixtral gives {name} by block"):
        decoder_of(config)
