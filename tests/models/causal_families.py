"""A tiny config of every class in transformers' mappings of causal language models and of image-text models."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.models.knob_families import GEMMA4, UNTRIED_FAMILIES

VOCABULARY = 97
_HEADS, _KEY_HEADS, _HEAD_WIDTH, _WIDTH = 4, 2, 8, 32
# Value -> the names under which configs have it.
_NAMES: Mapping[Any, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    _WIDTH: "hidden_size d_model n_embd n_embed dim model_dim embedding_size text_hidden_size decoder_hidden_size "
    "kv_channels_total attention_hidden_size lru_width embedding_dim word_embed_proj_dim",
    24: "intermediate_size ffn_dim n_inner dim_ff moe_intermediate_size shared_expert_intermediate_size "
    "ffn_hidden_size shared_intermediate_size moe_shared_expert_intermediate_size decoder_ffn_dim "
    "encoder_ffn_dim mlp_hidden_size dense_intermediate_size prefix_dense_intermediate_size "
    "intermediate_size_mlp expert_ffn_hidden_size feed_forward_size dff block_ff_dim",
    _HEADS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads rotary_dim",
    _KEY_HEADS: "num_key_value_heads num_experts_per_tok moe_topk moe_k num_experts_per_token linear_num_key_heads "
    "top_k_experts moe_top_k kv_n_heads zero_expert_num",
    _HEAD_WIDTH: "head_dim sliding_window kv_channels attention_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim global_head_dim sliding_window_size attention_window_size window_size qk_nope_head_dim "
    "qk_rope_head_dim kv_lora_rank q_lora_rank state_size ssm_state_size mamba_d_state mamba_head_dim mamba_d_head "
    "mamba_headdim chunk_size mamba_chunk_size time_step_rank mamba_dt_rank v_head_dim index_head_dim "
    "hidden_size_per_layer_input attention_chunk_size local_attention qkv_head_dim",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length context_length n_ctx",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts num_nextn_predict_layers n_groups mamba_n_groups "
    "mamba_ngroups first_k_dense_replace num_dense_layers",
}
# Of which None would leave out what is to be seen; another size without a default follows from others.
_OFTEN_NONE = (
    "head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
)  # fmt: skip
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def model_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of a family with every size that it declares under a known name made tiny.

    Raises whatever the vendor's class raises for it.
    """
    if model_type in _MADE:
        return _MADE[model_type]()
    return _tiny(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))


def _tiny(kind: Any, own: Mapping[str, Any]) -> Any:
    declared = kind.__dataclass_fields__
    chosen: dict[str, Any] = {name: value for name, value in _IDS.items() if name in declared}
    for name, value in SIZES.items():
        # Under a general name there may be one of the family's own, which then need not be known.
        own_name = kind.attribute_map.get(name, name)
        if own_name in declared and _is_size(declared[own_name]):
            chosen.setdefault(own_name, value)
    if "kv_lora_rank" in chosen:
        # Latent attention has keys for each head.
        chosen["num_key_value_heads"] = _HEADS
    if "is_decoder" in declared:
        chosen["is_decoder"] = True
    return kind(**{**chosen, **_parts(kind, own), **own})


def _parts(kind: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The configs that a config is made of, those apart that are given."""
    if not kind.sub_configs.keys() - own.keys():
        return {}
    plain = kind(**own)
    return {
        name: tiny_config(part.model_type) if part.model_type in CONFIG_MAPPING else _tiny(type(part), {})
        for name in kind.sub_configs.keys() - own.keys()
        if isinstance(part := getattr(plain, name, None), PreTrainedConfig)
    }


def _is_size(field: Any) -> bool:
    return isinstance(field.default, int | float) or (field.default is None and field.name in _OFTEN_NONE)


_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_SHARING = {"model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
_SHARING |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_SOUNDS = {
    "text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"},
    "decoder": {"model_type": "musicgen_decoder"},
}  # fmt: skip
# What a family needs beside tiny sizes.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 16},
    # A cache has as many layers as its encoder.
    "blenderbot": {"decoder_layers": 2},
    # Published configs have it, and the class does not declare it.
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    # It rounds the widths of its heads up to 64 in some places.
    "xlstm": {"hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    # Their own defaults are sections of wider heads.
    **{
        f"{name}_text": {"rope_parameters": dict(_SECTIONS)}
        for name in ("glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni", "qwen2_vl", "qwen2_5_vl")
    },
    "glm4v_moe_text": {"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}},
    # Published configs have it, and the classes do not declare it.
    **{name: {"vision_start_token_id": 3} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _SECTIONS}},
    "gemma4_assistant": {"text_config": _SHARING},
    "gemma4_unified_assistant": {"text_config": _SHARING | {"model_type": "gemma4_unified_text"}},
    **dict.fromkeys(("musicgen", "musicgen_melody"), _SOUNDS),
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
}
_ALL = (0, 1, 2, 3)
_MADE: dict[str, Callable[[], Any]] = {
    "gemma4_text": lambda: GEMMA4.make(_ALL, 2),
    "inkling_text": lambda: UNTRIED_FAMILIES["inkling_text"].make(_ALL, 2),
    "qwen4_exp_text": lambda: UNTRIED_FAMILIES["qwen4_exp"].make(_ALL, 3),
}
