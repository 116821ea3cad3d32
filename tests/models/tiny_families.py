"""Tiny random models of the families that formulas are known for, and their knobs turned by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
    Starcoder2Config,
)

HEAD_SIZE = 12
VOCABULARY = 97
IMAGE_TOKEN, VISION_START, VISION_END = 5, 7, 8
# 4 blocks, 4 heads of 2 key-value heads; widths such that no two products are alike.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WIDE_HEADS = {"head_dim": HEAD_SIZE}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
_QWEN_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 24}


def _llava(text: PreTrainedConfig, vision: PreTrainedConfig, **chosen: Any) -> LlavaConfig:
    return LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, **chosen)


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=20, intermediate_size=28, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8
    )


def _siglip() -> SiglipVisionConfig:
    return SiglipVisionConfig(
        hidden_size=20, intermediate_size=28, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8
    )


_QWEN_VL: dict[str, Any] = {
    "vision_config": {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 40,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 2],
    },
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 6,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}

TEXT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama, wide heads": lambda: LlamaConfig(**_SIZES, **_WIDE_HEADS),
    "mistral, window": lambda: MistralConfig(**_SIZES, sliding_window=8),
    "qwen2, window in two blocks": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_WIDE_HEADS),
    "starcoder2": lambda: Starcoder2Config(**_SIZES),
    "olmoe": lambda: OlmoeConfig(**_SIZES, **_EXPERTS),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2),
    "mixtral, window": lambda: MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2, sliding_window=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SIZES, **_QWEN_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS),
    "qwen3_moe, dense first": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS, mlp_only_layers=[0]),
    "qwen3_moe, every second": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS, decoder_sparse_step=2),
}
# Models that cut pictures into crops of 24 x 24 pixels with 9 patches.
CROP_FAMILIES: dict[str, Callable[[], LlavaConfig]] = {
    "llava": lambda: _llava(LlamaConfig(**_SIZES), _clip()),
    "llava, two feature layers": lambda: _llava(LlamaConfig(**_SIZES), _clip(), vision_feature_layer=[-2, -3]),
    "llava, siglip": lambda: _llava(LlamaConfig(**_SIZES), _siglip(), vision_feature_select_strategy="full"),
    "llava, experts": lambda: _llava(OlmoeConfig(**_SIZES, **_EXPERTS), _clip()),
}
# Models that take pictures of any size, in patches of 4 x 4 pixels.
PATCH_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_vl": lambda: Qwen3VLConfig(text_config={**_SIZES, **_WIDE_HEADS, **_MROPE}, **_QWEN_VL),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        text_config={**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS, **_MROPE}, **_QWEN_VL
    ),
}


def build(config: PreTrainedConfig) -> nn.Module:
    """A random model of the config, in evaluation mode."""
    torch.manual_seed(0)
    has_vision = hasattr(config, "vision_config")
    maker = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model: nn.Module = maker.from_config(config).eval()
    return model


def turn(model: Any, top_k: int | None, active_blocks: Sequence[int] | None) -> None:
    """Routers after the first get `top_k`; only `active_blocks` stay, renumbered, with their entries of the config."""
    decoder = model.get_decoder()
    if top_k is not None:
        routed = [block for block in decoder.layers if any(hasattr(module, "top_k") for module in block.modules())]
        for block in routed[1:]:
            for module in block.modules():
                if hasattr(module, "top_k"):
                    module.top_k = top_k
    if active_blocks is not None:
        decoder.layers = nn.ModuleList(decoder.layers[index] for index in active_blocks)
        for position, block in enumerate(decoder.layers):
            block.self_attn.layer_idx = position
        decoder.config.num_hidden_layers = len(active_blocks)
        if getattr(decoder.config, "layer_types", None) is not None:
            decoder.config.layer_types = [decoder.config.layer_types[index] for index in active_blocks]
