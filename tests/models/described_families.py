"""Tiny random models of every family whose decoder engines compute: odd numbers of heads, short windows.

Heads of 10 values have no kernel for the attention of a prompt, heads of 32 have.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from tests.models.knob_families import VISION_FAMILIES, enlarge_norms
from tests.models.tiny_families import IMAGE_TOKEN, PATCH_FAMILIES, VOCABULARY, build, config_class

WINDOW = 5
# 6 query heads of 3 key heads.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WIDE = {"head_dim": 32}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 3}
_OLMOE = {**_ROUTED, "head_dim": 6, "intermediate_size": 12}
_EXPERTS = {**_ROUTED, "moe_intermediate_size": 12}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 20}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


def _of(name: str, **chosen: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: config_class(name)(**{**_SIZES, **chosen})


TEXT: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _of("LlamaConfig"),
    "llama, llama3 positions": _of("LlamaConfig", **_rope("llama3", **_LLAMA3)),
    "llama, linear positions": _of("LlamaConfig", **_rope("linear", factor=2.0), tie_word_embeddings=True),
    "llama, yarn": _of("LlamaConfig", **_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": _of("MistralConfig", **_WIDE, sliding_window=WINDOW),
    "ministral": _of("MinistralConfig", sliding_window=WINDOW, layer_types=_KINDS),
    "qwen2": _of("Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": _of("Qwen3Config", **_WIDE),
    "olmo2": _of("Olmo2Config", **_WIDE),
    "smollm3": _of("SmolLM3Config", **_WIDE, no_rope_layers=[1, 1, 0, 1], use_sliding_window=False),
    "olmoe": _of("OlmoeConfig", **_OLMOE),
    "olmoe, weights that sum to 1": _of("OlmoeConfig", **_OLMOE, norm_topk_prob=True),
    "mixtral": _of("MixtralConfig", **_WIDE, num_local_experts=6, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen2_moe": _of("Qwen2MoeConfig", **_WIDE, **_SHARED),
    "qwen2_moe, every second": _of("Qwen2MoeConfig", **_SHARED, decoder_sparse_step=2),
    "qwen3_moe, block 0 dense": _of("Qwen3MoeConfig", **_WIDE, **_EXPERTS, mlp_only_layers=[0]),
    "flex_olmo": _of("FlexOlmoConfig", **_ROUTED),
}


def _pixtral(name: str, **chosen: Any) -> Callable[[], PreTrainedConfig]:
    """Pictures of 16 x 16 pixels in patches of 4 x 4."""
    tower = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = config_class("PixtralVisionConfig")(**tower, head_dim=8, image_size=16, patch_size=4)
    text = config_class("MistralConfig")(**_SIZES)
    return lambda: config_class(name)(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, **chosen)


def _qwen2_vl() -> PreTrainedConfig:
    tower = {"depth": 2, "embed_dim": 16, "hidden_size": 36, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]}}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    text = {**_SIZES, "head_dim": None, "hidden_size": 60, **rope}
    return config_class("Qwen2VLConfig")(text_config=text, vision_config={**tower, "hidden_size": 60}, **tokens)


def _onevision() -> PreTrainedConfig:
    tower = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 2}
    return config_class("LlavaOnevisionConfig")(
        text_config=config_class("Qwen2Config")(**_SIZES),
        vision_config={"model_type": "siglip_vision_model", **tower, "image_size": 24, "patch_size": 8},
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=[[24, 24]],
        vision_feature_layer=-1,
    )


def _prompt_with(features: int, **pictures: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[10, *[IMAGE_TOKEN] * features, 11, 12]]), **pictures}


def _square(side: int, *before: int) -> torch.Tensor:
    return torch.rand(*before, 3, side, side, generator=torch.Generator().manual_seed(2))


# Config and a prompt with one picture; families of `knob_families` that are left out here are refused.
_PICTURED: dict[str, tuple[Callable[[], PreTrainedConfig], Callable[[], dict[str, torch.Tensor]]]] = {
    "pixtral": (
        _pixtral("LlavaConfig", vision_feature_layer=-1, vision_feature_select_strategy="full"),
        lambda: _prompt_with(16, pixel_values=_square(16, 1), image_sizes=torch.tensor([[16, 16]])),
    ),
    "mistral3": (
        _pixtral("Mistral3Config", spatial_merge_size=2),
        lambda: _prompt_with(4, pixel_values=_square(16, 1), image_sizes=torch.tensor([[16, 16]])),
    ),
    "llava_onevision": (
        _onevision,
        # The whole picture and one tile of 9 patches each; the tile's 3 rows end with a newline feature: 9 + 9 + 3.
        lambda: _prompt_with(21, pixel_values=_square(24, 1, 2), image_sizes=torch.tensor([[24, 24]])),
    ),
    "qwen2_vl": (_qwen2_vl, VISION_FAMILIES["qwen2_5_vl"].picture),  # type: ignore[dict-item]
    "qwen3_vl": (PATCH_FAMILIES["qwen3_vl"], VISION_FAMILIES["qwen3_vl_moe"].picture),  # type: ignore[dict-item]
}
VISION = (*_PICTURED, "llava, olmoe", "llava_next", "internvl", "smolvlm", "qwen2_5_vl", "qwen3_vl_moe")


def text_model(name: str) -> Any:
    """A random model, in evaluation mode."""
    return enlarge_norms(build(TEXT[name]()))


def pictured(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model in evaluation mode, and a prompt with a picture."""
    if name in _PICTURED:
        config, inputs = _PICTURED[name]
        return enlarge_norms(build(config())), inputs()
    family: Any = VISION_FAMILIES[name]
    return family.built(), family.picture()
