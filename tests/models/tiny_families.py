"""Tiny random models of the families that formulas are known for, and their knobs turned by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
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


def config_class(name: str) -> Any:
    """A config class; skips where this version of transformers does not have it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def _text(name: str, **chosen: Any) -> Any:
    return config_class(name)(**{**_SIZES, **chosen})


def _latent(**chosen: Any) -> Any:
    ranks = {"kv_lora_rank": 14, "q_lora_rank": 18, "qk_rope_head_dim": HEAD_SIZE, "qk_nope_head_dim": 6}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24}
    groups = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    return _text("DeepseekV3Config", v_head_dim=8, **{**ranks, **experts, **groups, **chosen})


_QWEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_GLM_IDS = (
    "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id",
    "video_end_token_id",
)  # fmt: skip
# Family -> class of its config, and where that has the ids of its special tokens.
_PICTURE_CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "llava": ("LlavaConfig", ("image_token_index",)),
    "llava_next": ("LlavaNextConfig", ("image_token_index",)),
    "aria": ("AriaConfig", ("image_token_index",)),
    "internvl": ("InternVLConfig", ("image_token_id",)),
    "smolvlm": ("SmolVLMConfig", ("image_token_id",)),
    "idefics3": ("Idefics3Config", ("image_token_id",)),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", _QWEN_IDS),
    "qwen3_vl": ("Qwen3VLConfig", _QWEN_IDS),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", _QWEN_IDS),
    "glm4v": ("Glm4vConfig", _GLM_IDS),
    "glm4v_moe": ("Glm4vMoeConfig", _GLM_IDS),
}
_TEXT_TYPES = {"aria": "aria_text", "internvl": "qwen2", "smolvlm": "llama", "idefics3": "llama"}
_IDS = (IMAGE_TOKEN, 6, VISION_START, VISION_END, 9, 13)


def picture_config(family: str, text: Any, vision: Any, ids: Sequence[int] = _IDS, **more: Any) -> Any:
    """The config of a family that takes pictures.

    Args:
        text, vision: of its decoder and of its tower, as configs or as their values.
        ids: of the tokens of a picture and of a video, and of both ends of the one and the other.
    """
    name, id_names = _PICTURE_CONFIGS[family]
    if family in _TEXT_TYPES:
        text = {"model_type": _TEXT_TYPES[family], **text}
    if family == "aria":
        vision = {"model_type": "idefics3_vision", **vision}
    tokens = dict(zip(id_names, ids, strict=False))
    return config_class(name)(text_config=text, vision_config=vision, **tokens, **more)


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Positions in time, height and width, each with so many pairs of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def _tower(**chosen: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 2}
    return {**sizes, "image_size": 24, "patch_size": 8, **chosen}


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(**_tower())


TEXT_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama, wide heads": lambda: LlamaConfig(**_SIZES, **_WIDE_HEADS),
    "mistral, window": lambda: MistralConfig(**_SIZES, sliding_window=8),
    "qwen2, window in two blocks": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_WIDE_HEADS),
    "olmo2": lambda: _text("Olmo2Config"),
    "starcoder2": lambda: Starcoder2Config(**_SIZES),
    "olmoe": lambda: OlmoeConfig(**_SIZES, **_EXPERTS),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2),
    "mixtral, window": lambda: MixtralConfig(**_SIZES, num_local_experts=6, num_experts_per_tok=2, sliding_window=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(**_SIZES, **_QWEN_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS),
    "qwen3_moe, dense first": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS, mlp_only_layers=[0]),
    "qwen3_moe, every second": lambda: Qwen3MoeConfig(**_SIZES, **_WIDE_HEADS, **_QWEN_EXPERTS, decoder_sparse_step=2),
    "gpt_oss": lambda: _text("GptOssConfig", **_WIDE_HEADS, sliding_window=8, num_local_experts=6),
    "granitemoe": lambda: _text("GraniteMoeConfig", num_local_experts=6),
    "deepseek_v3": lambda: _latent(),
    "deepseek_v3, queries whole": lambda: _latent(q_lora_rank=None, first_k_dense_replace=2),
}


def _aria() -> Any:
    # Of 24 x 24 and of 32 x 32 pixels.
    text = {**_SIZES, "moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2}
    return picture_config("aria", text, _tower(image_size=32), projector_patch_to_query_dict={9: 4, 16: 6})


# Models that cut pictures into crops of 24 x 24 pixels with 9 patches, InternVL 32 x 32 with 16.
CROP_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": lambda: picture_config("llava", LlamaConfig(**_SIZES), _clip()),
    "llava, two feature layers": lambda: picture_config(
        "llava", LlamaConfig(**_SIZES), _clip(), vision_feature_layer=[-2, -3]
    ),
    "llava, siglip": lambda: picture_config(
        "llava", LlamaConfig(**_SIZES), SiglipVisionConfig(**_tower()), vision_feature_select_strategy="full"
    ),
    "llava, experts": lambda: picture_config("llava", OlmoeConfig(**_SIZES, **_EXPERTS), _clip()),
    "llava_next": lambda: picture_config(
        "llava_next", LlamaConfig(**_SIZES), _clip(), image_grid_pinpoints=[[24, 24], [24, 48]]
    ),
    "internvl": lambda: picture_config("internvl", _SIZES, _tower(image_size=[32, 32], patch_size=[8, 8])),
    "smolvlm": lambda: picture_config("smolvlm", _SIZES, _tower(), scale_factor=3, pad_token_id=0),
    "idefics3": lambda: picture_config("idefics3", _SIZES, _tower(), scale_factor=3, pad_token_id=0),
    "aria": _aria,
    "aria, large crops": _aria,
}


def crop_inputs(name: str, crops: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Vision tokens of the prompt, and the arguments of the vision stage for so many crops (LLaVA-NeXT: at least 2)."""
    family = name.partition(",")[0]
    if family == "llava_next":
        # The whole picture, and tiles side by side in 3 rows of tokens that each end with one more.
        tiles = crops - 1
        sizes = {"image_sizes": torch.tensor([[24, 24 * tiles]])}
        return 9 + 3 * (3 * tiles + 1), {"pixel_values": torch.rand(1, crops, 3, 24, 24), **sizes}
    if family == "aria":
        side, queries = (32, 6) if "large" in name else (24, 4)
        mask = torch.ones(crops, side, side, dtype=torch.bool)
        mask[:, side // 2 :] = False  # padded
        return queries * crops, {"pixel_values": torch.rand(crops, 3, side, side), "pixel_mask": mask}
    if family == "internvl":
        return 4 * crops, {"pixel_values": torch.rand(crops, 3, 32, 32)}  # 16 patches, 4 of them a token
    if family in ("smolvlm", "idefics3"):
        return crops, {"pixel_values": torch.rand(1, crops, 3, 24, 24)}  # all 9 patches one token
    return 9 * crops, {"pixel_values": torch.rand(crops, 3, 24, 24)}


_PATCH_TOWER = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 28, "num_heads": 2, "patch_size": 4, "out_hidden_size": 40,
}  # fmt: skip
_DEEP_TOWER = {**_PATCH_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}


def _qwen2_5_vl() -> Any:
    # Windows of 4 x 4 patches, in all blocks but one.
    tower = {**_PATCH_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return picture_config("qwen2_5_vl", {**_SIZES, **mrope(1, 2, 2)}, tower)


def _qwen3_vl(name: str, **experts: Any) -> Any:
    return picture_config(name, {**_SIZES, **_WIDE_HEADS, **experts, **mrope(2, 2, 2)}, _DEEP_TOWER)


def _glm4v() -> Any:
    text = {**_SIZES, **mrope(1, 2, 2, partial_rotary_factor=1.0)}
    return picture_config("glm4v", text, {**_PATCH_TOWER, "image_size": 24})


def _glm4v_moe() -> Any:
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
    rope = mrope(2, 2, 2, partial_rotary_factor=1.0)
    text = {**_SIZES, **_WIDE_HEADS, **experts, **rope, "first_k_dense_replace": 1}
    return picture_config("glm4v_moe", text, {**_PATCH_TOWER, "image_size": 24})


# Models that take pictures of any size, in patches of 4 x 4 pixels.
PATCH_FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_vl": lambda: _qwen3_vl("qwen3_vl"),
    "qwen3_vl_moe": lambda: _qwen3_vl("qwen3_vl_moe", **_QWEN_EXPERTS),
    "qwen2_5_vl": _qwen2_5_vl,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
}


def build(config: PreTrainedConfig) -> nn.Module:
    """A random model of the config, in evaluation mode."""
    torch.manual_seed(0)
    is_image_text = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    maker = AutoModelForImageTextToText if is_image_text else AutoModelForCausalLM
    model: nn.Module = maker.from_config(config).eval()
    return model


def turn(model: Any, top_k: int | None, active_blocks: Sequence[int] | None) -> None:
    """Routers after the first get `top_k`; only `active_blocks` stay, renumbered, with their entries of the config."""
    decoder = model.get_decoder()
    if top_k is not None:
        routed = [block for block in decoder.layers if any(hasattr(module, "top_k") for module in block.modules())]
        if not routed:
            pytest.skip(f"in transformers {transformers.__version__} no router of this family has a top-k of its own")
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
