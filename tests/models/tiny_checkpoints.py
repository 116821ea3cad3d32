"""Tiny random checkpoints in the layout that the hub has: weights, configs, tokenizer, processor and chat template."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AriaImageProcessorPil,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlamaConfig,
    LlavaNextImageProcessorPil,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)

from tests.models.tiny_families import config_class, mrope, picture_config

CONTEXT = 4096
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
# CLIP crops of 24 pixels in patches of 8: 9 features; SmolVLM tiles of 32 in patches of 8, four joined: 4 features;
# InternVL tiles of 16 in patches of 4, four joined: 4 features; Qwen and GLM tokens of 8 x 8 pixels.
CLIP_SIDE, IDEFICS_TILE, INTERNVL_TILE, PATCH = 24, 32, 16, 4
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class _Family:
    """How a checkpoint of one family is made.

    Attributes:
        config: from the tokenizer's ids.
        specials: tokens beside pad, begin and end of text; those under names become attributes of the tokenizer.
        image_processor: None for a text model.
        processor: what `processor_config.json` holds.
        template: Jinja text; None for a base model.
    """

    config: Callable[["_Ids"], PreTrainedConfig]
    specials: dict[str, str] = field(default_factory=dict)
    image_processor: Callable[[], Any] | None = None
    processor: dict[str, Any] = field(default_factory=dict)
    template: str | None = None


class _Ids:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __getitem__(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    @property
    def text(self) -> dict[str, Any]:
        """Sizes and ids of a text config."""
        marks = {"pad_token_id": self[PAD], "bos_token_id": self[BOS], "eos_token_id": self[EOS]}
        return {**_SIZES, **marks, "vocab_size": len(self.tokenizer)}


def _parts_template(picture: str, before: str, after: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}" + before + "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}" + picture + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}" + after + "{% endif %}"
    )


_CHAT = _parts_template("<image>\n", "USER: ", " ASSISTANT:")
_TEXT_CHAT = (
    "{{ bos_token }}{% for message in messages %}USER: {{ message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_QWEN_CHAT = _parts_template("<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>user\n", "<|im_end|>\n")
_QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _tower(side: int | list[int], patch: int | list[int]) -> dict[str, Any]:
    """A vision tower for pictures of this side, cut into patches."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "image_size": side, "patch_size": patch}


def _llava(ids: _Ids) -> PreTrainedConfig:
    clip = CLIPVisionConfig(**_tower(CLIP_SIDE, 8))
    return picture_config("llava", OlmoeConfig(**ids.text, **_EXPERTS), clip, [ids["<image>"]])


def _llava_next(ids: _Ids) -> PreTrainedConfig:
    pinpoints = [[CLIP_SIDE * rows, CLIP_SIDE * cols] for rows, cols in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
    clip = CLIPVisionConfig(**_tower(CLIP_SIDE, 8))
    text = LlamaConfig(**ids.text)
    return picture_config("llava_next", text, clip, [ids["<image>"]], image_grid_pinpoints=pinpoints)


_PATCH_TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 32,
}  # fmt: skip
_QWEN_IDS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_GLM_IDS = (
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
)  # fmt: skip


def _qwen2_5_vl(ids: _Ids) -> PreTrainedConfig:
    tower = {**_PATCH_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    return picture_config("qwen2_5_vl", {**ids.text, **mrope(1, 1, 2)}, tower, [*map(ids.__getitem__, _QWEN_IDS)])


def _qwen3_vl_moe(ids: _Ids) -> PreTrainedConfig:
    tower = {**_PATCH_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {**ids.text, **_EXPERTS, "moe_intermediate_size": 16, "head_dim": 8, **mrope(1, 1, 2)}
    return picture_config("qwen3_vl_moe", text, tower, [*map(ids.__getitem__, _QWEN_IDS)])


def _glm4v_moe(ids: _Ids) -> PreTrainedConfig:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    dense = {"topk_group": 1, "head_dim": 8, "first_k_dense_replace": 1}
    text = {**ids.text, **experts, **dense, **mrope(1, 1, 2, partial_rotary_factor=1.0)}
    tower = {**_PATCH_TOWER, "image_size": 32}
    return picture_config("glm4v_moe", text, tower, [*map(ids.__getitem__, _GLM_IDS)])


def _glm4v(ids: _Ids) -> PreTrainedConfig:
    text = {**ids.text, **mrope(1, 1, 2, partial_rotary_factor=1.0)}
    return picture_config("glm4v", text, {**_PATCH_TOWER, "image_size": 32}, [*map(ids.__getitem__, _GLM_IDS)])


def _internvl(ids: _Ids) -> PreTrainedConfig:
    tower = _tower([INTERNVL_TILE, INTERNVL_TILE], [PATCH, PATCH])
    return picture_config("internvl", ids.text, tower, [ids["<IMG_CONTEXT>"]], image_seq_length=4)


def _idefics(family: str) -> Callable[[_Ids], PreTrainedConfig]:
    tower = _tower(IDEFICS_TILE, 8)
    return lambda ids: picture_config(family, ids.text, tower, [ids["<image>"]], scale_factor=2)


def _aria(ids: _Ids) -> PreTrainedConfig:
    # The sides of Aria's crops are fixed at 490 and 980 pixels: 35 x 35 and 70 x 70 patches.
    text = {**ids.text, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    return picture_config("aria", text, _tower(980, 14), [ids["<|img|>"]])


def _of(name: str, ids: _Ids, **chosen: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = config_class(name)(**{**ids.text, **chosen})
    return config


def _longcat_flash(ids: _Ids) -> PreTrainedConfig:
    text = {name: value for name, value in ids.text.items() if name not in ("num_hidden_layers", "intermediate_size")}
    latent = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
    experts = {"moe_topk": 3, "n_routed_experts": 6, "zero_expert_num": 2, "expert_ffn_hidden_size": 12}
    sizes = {"num_layers": 2, "ffn_hidden_size": 24, "num_key_value_heads": 4, "head_dim": 4}
    config: PreTrainedConfig = config_class("LongcatFlashConfig")(**{**text, **latent, **experts, **sizes})
    return config


_IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
    **{f"_{row}_{col}": f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)},
}
_IDEFICS_SIZES = {"size": {"longest_edge": 4 * IDEFICS_TILE}, "max_image_size": {"longest_edge": IDEFICS_TILE}}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
_CLIP_SIZES = {"size": {"shortest_edge": CLIP_SIDE}, "crop_size": {"height": CLIP_SIDE, "width": CLIP_SIDE}}
_LLAVA_PARTS = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}

_FAMILIES: dict[str, _Family] = {
    "olmoe": _Family(lambda ids: OlmoeConfig(**ids.text, **_EXPERTS), template=_TEXT_CHAT),
    "llama": _Family(lambda ids: LlamaConfig(**ids.text)),
    "longcat_flash": _Family(_longcat_flash),
    "gpt_oss": _Family(
        lambda ids: _of("GptOssConfig", ids, num_local_experts=8, num_experts_per_tok=4, head_dim=8),
        template=_TEXT_CHAT,
    ),
    "jetmoe": _Family(lambda ids: _of("JetMoeConfig", ids, kv_channels=16, num_local_experts=4, num_experts_per_tok=2)),
    "olmoe, odd widths": _Family(lambda ids: OlmoeConfig(**{**ids.text, "intermediate_size": 21}, **_EXPERTS)),
    "llava": _Family(
        _llava,
        {"image_token": "<image>"},
        lambda: CLIPImageProcessorPil(**_CLIP_SIZES),
        {"processor_class": "LlavaProcessor", **_LLAVA_PARTS},
    ),
    "llava_next": _Family(
        _llava_next,
        {"image_token": "<image>"},
        lambda: LlavaNextImageProcessorPil(
            **_CLIP_SIZES, image_grid_pinpoints=[[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
        ),
        {"processor_class": "LlavaNextProcessor", **_LLAVA_PARTS},
        _CHAT,
    ),
    "qwen2_5_vl": _Family(
        _qwen2_5_vl,
        dict(zip("abcdef", _QWEN_TOKENS, strict=True)),
        lambda: Qwen2VLImageProcessorPil(patch_size=PATCH),
        {"processor_class": "Qwen2_5_VLProcessor"},
        _QWEN_CHAT,
    ),
    "qwen3_vl_moe": _Family(
        _qwen3_vl_moe,
        dict(zip("abcdef", _QWEN_TOKENS, strict=True)),
        lambda: Qwen2VLImageProcessorPil(patch_size=PATCH),
        {"processor_class": "Qwen3VLProcessor"},
        _QWEN_CHAT,
    ),
    "internvl": _Family(
        _internvl,
        _INTERNVL_TOKENS,
        lambda: GotOcr2ImageProcessorPil(
            size={"height": INTERNVL_TILE, "width": INTERNVL_TILE}, crop_to_patches=True, max_patches=12
        ),
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        _parts_template("<IMG_CONTEXT>\n", "<|im_start|>user\n", "<|im_end|>\n"),
    ),
    "smolvlm": _Family(
        _idefics("smolvlm"),
        _IDEFICS_TOKENS,
        lambda: SmolVLMImageProcessorPil(**_IDEFICS_SIZES),
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        _parts_template("<image>", "User:", "<end_of_utterance>\nAssistant:"),
    ),
    "idefics3": _Family(
        _idefics("idefics3"),
        _IDEFICS_TOKENS,
        lambda: Idefics3ImageProcessorPil(**_IDEFICS_SIZES),
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        _parts_template("<image>", "User:", "<end_of_utterance>\nAssistant:"),
    ),
    "aria": _Family(
        _aria,
        {"image_token": "<|img|>", "a": "<fim_prefix>", "b": "<fim_suffix>"},
        lambda: AriaImageProcessorPil(),
        {"processor_class": "AriaProcessor", "size_conversion": {"490": 128, "980": 256}},
        _parts_template("<fim_prefix><|img|><fim_suffix>", "user\n", "\nassistant\n"),
    ),
    "glm4v_moe": _Family(
        _glm4v_moe,
        {"image_token": "<|image|>", "video_token": "<|video|>", **dict(zip("abcd", _GLM_TOKENS, strict=True))},
        lambda: Glm4vImageProcessorPil(patch_size=PATCH),
        {"processor_class": "Glm4vProcessor"},
        _parts_template("<|begin_of_image|><|image|><|end_of_image|>", "<|user|>\n", "<|assistant|>\n"),
    ),
}
_GEMMA_TOKENS = {
    "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
}  # fmt: skip
_SOUND_TOKENS = {"audio_token": "<audio>", "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"}
_OVIS_TOKENS = {f"a{name}": f"<IMG_{name}>" for name in ("ATOM", "START", "GRID", "COL", "ROW", "END")}
_AYA_TOKENS = {
    f"a{number}": token
    for number, token in enumerate(
        ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", "TILE"]
    )
}


def _gemma3(ids: _Ids) -> PreTrainedConfig:
    # 2 x 2 tokens of 4 x 4 patches.
    tower, text = _tower(32, 8), {**ids.text, "head_dim": 8, "sliding_window": 16}
    marks = {"boi_token_index": ids["<start_of_image>"], "eoi_token_index": ids["<end_of_image>"]}
    config: PreTrainedConfig = config_class("Gemma3Config")(
        text_config=text,
        vision_config=tower,
        image_token_index=ids["<image_soft_token>"],
        mm_tokens_per_image=4,
        **marks,
    )
    return config


def _gemma4(ids: _Ids, **chosen: Any) -> PreTrainedConfig:
    tower = {**_tower(0, PATCH), "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
    text = {**ids.text, "head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 16}
    rotary = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")}
    ends = {"boi_token_id": ids["<start_of_image>"], "eoi_token_id": ids["<end_of_image>"]}
    del tower["image_size"]
    config: PreTrainedConfig = config_class("Gemma4Config")(
        text_config={**text, "rope_parameters": rotary, **chosen},
        vision_config=tower,
        image_token_id=ids["<image_soft_token>"],
        **ends,
    )
    return config


def _gemma4_e2b(ids: _Ids) -> PreTrainedConfig:
    """Embeddings for each block, and the last half of the blocks with wider MLPs and the keys of others."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    shared = {"num_hidden_layers": 6, "layer_types": kinds, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    embedded = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(ids.tokenizer)}
    return _gemma4(ids, global_head_dim=16, **shared, **embedded)


def _phi4_multimodal(ids: _Ids) -> PreTrainedConfig:
    # Its processor counts the tokens of crops of 448 pixels in patches of 14.
    tower = {**_tower(448, 14), "image_token_id": ids["<|image|>"]}
    sound = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2, "input_size": 8}
    convolved = {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}
    marks = {"audio_token_id": ids["<|audio|>"]}
    return _of("Phi4MultimodalConfig", ids, vision_config=tower, audio_config={**sound, **convolved, **marks})


def _onevision(ids: _Ids) -> PreTrainedConfig:
    tower = {"model_type": "siglip_vision_model", **_tower(CLIP_SIDE, 8), "vision_use_head": False}
    config: PreTrainedConfig = config_class("LlavaOnevisionConfig")(
        text_config={"model_type": "qwen2", **ids.text}, vision_config=tower, image_token_index=ids["<image>"],
        image_grid_pinpoints=_ONEVISION_CANVASES, vision_feature_layer=-1,
    )  # fmt: skip
    return config


def _ovis2(ids: _Ids) -> PreTrainedConfig:
    # 2 x 2 patches of 8 pixels joined.
    tower = {**_tower(INTERNVL_TILE, PATCH), "hidden_stride": 2, "vocab_size": 24, "num_visual_indicator_tokens": 5}
    marks = [ids[f"<IMG_{name}>"] for name in ("START", "GRID", "COL", "ROW", "END")]
    config: PreTrainedConfig = config_class("Ovis2Config")(
        text_config={"model_type": "qwen2", **ids.text}, vision_config=tower, image_token_id=ids["<IMG_ATOM>"],
        visual_indicator_token_ids=marks, vocab_size=ids.text["vocab_size"], hidden_size=32,
    )  # fmt: skip
    return config


def _aya(ids: _Ids) -> PreTrainedConfig:
    tower = {"model_type": "siglip_vision_model", **_tower(INTERNVL_TILE, PATCH), "vision_use_head": False}
    text = {"model_type": "cohere2", **ids.text, "sliding_window": 16}
    config: PreTrainedConfig = config_class("AyaVisionConfig")(
        text_config=text, vision_config=tower, image_token_index=ids["<|IMG_PATCH|>"], downsample_factor=2
    )
    return config


_ONEVISION_CANVASES = [[CLIP_SIDE * rows, CLIP_SIDE * cols] for rows in range(1, 4) for cols in range(1, 4)]
_TILE_SIZE = {"height": INTERNVL_TILE, "width": INTERNVL_TILE}
# Families without a rule of their own.
_TRIED: dict[str, _Family] = {
    "gemma3": _Family(
        _gemma3,
        _GEMMA_TOKENS,
        lambda: transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        _parts_template("<start_of_image>", "<start_of_turn>user\n", "<end_of_turn>\n"),
    ),
    "gemma4": _Family(
        _gemma4,
        {**_GEMMA_TOKENS, **_SOUND_TOKENS},
        lambda: transformers.Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=2, max_soft_tokens=280),
        {"processor_class": "Gemma4Processor"},
        _parts_template("<image_soft_token>", "<start_of_turn>user\n", "<end_of_turn>\n"),
    ),
    "llava_onevision": _Family(
        _onevision,
        {"image_token": "<image>", "video_token": "<video>"},
        lambda: transformers.LlavaOnevisionImageProcessorPil(
            size={"height": CLIP_SIDE, "width": CLIP_SIDE}, image_grid_pinpoints=_ONEVISION_CANVASES
        ),
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 9, "vision_feature_select_strategy": "full"},
        _parts_template("<image>\n", "<|im_start|>user\n", "<|im_end|>\n"),
    ),
    "ovis2": _Family(
        _ovis2,
        {**_OVIS_TOKENS, "b": "<image>"},
        lambda: transformers.Ovis2ImageProcessorPil(size=_TILE_SIZE, crop_to_patches=True, max_patches=9),
        {"processor_class": "Ovis2Processor", "image_seq_length": 4},
        _parts_template("<image>", "<|im_start|>user\n", "<|im_end|>\n"),
    ),
    "aya_vision": _Family(
        _aya,
        {**_AYA_TOKENS, "b": "<image>"},
        lambda: GotOcr2ImageProcessorPil(size=_TILE_SIZE, crop_to_patches=True, max_patches=12),
        {
            "processor_class": "AyaVisionProcessor",
            "img_size": INTERNVL_TILE,
            "patch_size": PATCH,
            "downsample_factor": 2,
        },
        _parts_template("<image>", "<|START|>", "<|END|>"),
    ),
}
TRIED_FAMILIES = tuple(_TRIED)
# Other sizes and parts of families above.
_VARIANTS = {
    "glm4v": replace(_FAMILIES["glm4v_moe"], config=_glm4v),
    "gemma4_e2b": replace(_TRIED["gemma4"], config=_gemma4_e2b),
}
VARIANTS = tuple(_VARIANTS)
# Families whose image processor needs torchvision.
_OF_TORCHVISION: dict[str, _Family] = {
    "phi4_multimodal": _Family(
        _phi4_multimodal,
        {"image_token": "<|image|>", "audio_token": "<|audio|>"},
        lambda: transformers.Phi4MultimodalImageProcessor(),
        {"processor_class": "Phi4MultimodalProcessor"},
        _TEXT_CHAT,
    ),
}
TEXT_FAMILIES = ("olmoe", "llama")
VISION_FAMILIES = tuple(name for name, family in _FAMILIES.items() if family.image_processor is not None)


def _latent_sparse(config: str) -> _Family:
    """Latent attention to the 4 positions that an indexer chooses."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8, "num_key_value_heads": 4}
    index = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
    return family_named(config, **latent, **experts, **groups, **index)


def family_named(config: str, **values: Any) -> _Family:
    """A text model by the name of its config, which older versions of transformers may lack."""
    return _Family(lambda ids: getattr(transformers, config)(**{**ids.text, **values}))


# Their blocks look at the padding, or at the other rows of a batch, in transformers 5.23.
UNBATCHABLE_FAMILIES: dict[str, _Family] = {
    "doge": family_named("DogeConfig", is_moe=True, num_experts=16, num_experts_per_tok=2),
    "deepseek_v32": _latent_sparse("DeepseekV32Config"),
    "glm_moe_dsa": _latent_sparse("GlmMoeDsaConfig"),
    "deepseek_v4": family_named(
        "DeepseekV4Config",
        **{"head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8},
        **{
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["moe"] * 3,
        },
        **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "sliding_window": 8, "hc_mult": 2},
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    ),
    "minimax_m3": family_named(
        "MiniMaxM3VLTextConfig",
        **{"head_dim": 8, "rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"dense_intermediate_size": 24, "shared_intermediate_size": 24, "mlp_layer_types": ["sparse"] * 3},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
        layer_types=["minimax_m3_sparse"] * 3,
    ),
}


def write_checkpoint(family: str | _Family, folder: Path, **tower: int) -> Path:
    """A whole checkpoint of a family, of `TEXT_FAMILIES`, `VISION_FAMILIES` or an unusual one, with random weights and
    other sizes of the vision tower; gives the folder.
    """
    every = _FAMILIES | _TRIED | _VARIANTS | _OF_TORCHVISION | UNBATCHABLE_FAMILIES
    made = every[family] if isinstance(family, str) else family
    tokenizer = _tokenizer(made.specials)
    config: Any = made.config(_Ids(tokenizer))
    for name, value in tower.items():
        setattr(config.vision_config, name, value)
    is_image_text = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    maker = AutoModelForImageTextToText if is_image_text else AutoModelForCausalLM
    torch.manual_seed(5)
    model = maker.from_config(config)
    marks = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**marks, bos_token_id=tokenizer.bos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if made.template is not None:
        (folder / "chat_template.jinja").write_text(made.template)
    if made.image_processor is not None:
        pictures = json.loads(made.image_processor().to_json_string())
        kind = pictures["image_processor_type"].removesuffix("Pil")
        named = {**pictures, "image_processor_type": kind, "processor_class": made.processor["processor_class"]}
        (folder / "preprocessor_config.json").write_text(json.dumps(named, indent=2))
        (folder / "processor_config.json").write_text(json.dumps(made.processor, indent=2))
    return folder


def bounded_pictures(folder: Path, fewest_pixels: int, most_pixels: int) -> None:
    """Give a checkpoint that takes pictures in their own shape other bounds."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            size = {"shortest_edge": fewest_pixels, "longest_edge": most_pixels}
            content.get("image_processor", content)["size"] = size
            (folder / name).write_text(json.dumps(content))


def _tokenizer(specials: dict[str, str]) -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones behind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    named = {name: token for name, token in specials.items() if name.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        extra_special_tokens=named,
    )
    tokenizer.add_tokens([token for name, token in specials.items() if name not in named], special_tokens=True)
    return tokenizer
