"""Tiny checkpoints of more families that take pictures, for `write_checkpoint`."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.models.tiny_checkpoints import (
    _CHAT,
    _PATCH_TOWER,
    _QWEN_CHAT,
    _QWEN_IDS,
    _QWEN_TOKENS,
    PATCH,
    _Family,
    _Ids,
    _parts_template,
    _tower,
)
from tests.models.tiny_families import config_class, mrope, picture_config

SIDE, FEATURES = 24, 9


def _picture_config(name: str, text: dict[str, Any], tower: dict[str, Any], **more: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = config_class(name)(text_config=text, vision_config=tower, **more)
    return config


_SIGLIP = {"model_type": "siglip_vision_model", **_tower(SIDE, 8)}


def _images(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**options)


_SQUARE = {"size": {"height": SIDE, "width": SIDE}}


def _gemma3(ids: _Ids) -> PreTrainedConfig:
    text = {"model_type": "gemma3_text", **ids.text, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    tokens = {"image_token_id": ids["<image_soft_token>"], "boi_token_id": ids["<start_of_image>"]}
    return _picture_config(
        "Gemma3Config", text, _SIGLIP, **tokens, eoi_token_id=ids["<end_of_image>"], mm_tokens_per_image=FEATURES
    )


def _paligemma(ids: _Ids) -> PreTrainedConfig:
    text = {"model_type": "gemma", **ids.text, "head_dim": 8}
    tower = {**_SIGLIP, "projection_dim": 32, "num_image_tokens": FEATURES}
    return _picture_config("PaliGemmaConfig", text, tower, image_token_id=ids["<image>"], projection_dim=32)


def _llava_onevision(ids: _Ids) -> PreTrainedConfig:
    grid = [[SIDE * rows, SIDE * cols] for rows, cols in ((1, 1), (1, 2), (2, 1), (2, 2))]
    return _picture_config(
        "LlavaOnevisionConfig",
        {"model_type": "qwen2", **ids.text},
        _SIGLIP,
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=grid,
        vision_aspect_ratio="anyres_max_4",
        vision_feature_select_strategy="full",
    )


def _qwen2_vl(ids: _Ids) -> PreTrainedConfig:
    tower = {"depth": 2, "embed_dim": 16, "num_heads": 2, "patch_size": PATCH, "hidden_size": 32, "mlp_ratio": 2}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = dict(zip(names, map(ids.__getitem__, _QWEN_IDS), strict=True))
    return _picture_config("Qwen2VLConfig", {**ids.text, **mrope(1, 1, 2)}, tower, **tokens)


def _qwen3_vl(ids: _Ids) -> PreTrainedConfig:
    tower = {**_PATCH_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = {**ids.text, "head_dim": 8, **mrope(1, 1, 2)}
    return picture_config("qwen3_vl", text, tower, [*map(ids.__getitem__, _QWEN_IDS)])


_OVIS_MARKS = ("START", "GRID", "COL", "ROW", "END")


def _ovis2(ids: _Ids) -> PreTrainedConfig:
    tower = {
        **_tower(SIDE, 4),
        "num_visual_indicator_tokens": 5,
        "vocab_size": 40,
        "hidden_stride": 2,
        "tokenize_function": "softmax",
    }
    indicators = [ids[f"<IMG_{each}>"] for each in _OVIS_MARKS]
    return _picture_config(
        "Ovis2Config",
        {"model_type": "qwen2", **ids.text},
        tower,
        image_token_id=ids["<IMG_ATOM>"],
        visual_indicator_token_ids=indicators,
        hidden_size=32,
    )


PICTURE_FAMILIES = {
    "gemma3": _Family(
        _gemma3,
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        _images("Gemma3ImageProcessorPil", **_SQUARE),
        {"processor_class": "Gemma3Processor", "image_seq_length": FEATURES},
        _parts_template("<start_of_image>", "user\n", "\nmodel\n"),
    ),
    "paligemma": _Family(
        _paligemma,
        {"image_token": "<image>"},
        _images("SiglipImageProcessorPil", **_SQUARE, image_seq_length=FEATURES),
        {"processor_class": "PaliGemmaProcessor"},
    ),
    "llava_onevision": _Family(
        _llava_onevision,
        {"image_token": "<image>", "video_token": "<video>"},
        _images(
            "LlavaOnevisionImageProcessorPil", **_SQUARE, image_grid_pinpoints=[[24, 24], [24, 48], [48, 24], [48, 48]]
        ),
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": FEATURES,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        _CHAT,
    ),
    "qwen2_vl": _Family(
        _qwen2_vl,
        dict(zip("abcdef", _QWEN_TOKENS, strict=True)),
        _images("Qwen2VLImageProcessorPil", patch_size=PATCH),
        {"processor_class": "Qwen2VLProcessor"},
        _QWEN_CHAT,
    ),
    "qwen3_vl": _Family(
        _qwen3_vl,
        dict(zip("abcdef", _QWEN_TOKENS, strict=True)),
        _images("Qwen2VLImageProcessorPil", patch_size=PATCH),
        {"processor_class": "Qwen3VLProcessor"},
        _QWEN_CHAT,
    ),
    "ovis2": _Family(
        _ovis2,
        {each: f"<IMG_{each}>" for each in ("ATOM", *_OVIS_MARKS)} | {"image_token": "<image>"},
        _images("Ovis2ImageProcessorPil", **_SQUARE),
        {"processor_class": "Ovis2Processor", "image_seq_length": 9},
        _CHAT,
    ),
}
