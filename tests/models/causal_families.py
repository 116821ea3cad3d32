"""A tiny config of every class in transformers' mapping of causal language models."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.knob_families import GEMMA4_EXPERTS, UNTRIED_FAMILIES

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
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers",
    _HEADS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads",
    _KEY_HEADS: "num_key_value_heads num_experts_per_tok moe_topk moe_k num_experts_per_token linear_num_key_heads "
    "top_k_experts",
    _HEAD_WIDTH: "head_dim sliding_window kv_channels attention_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim global_head_dim sliding_window_size attention_window_size window_size qk_nope_head_dim "
    "qk_rope_head_dim kv_lora_rank q_lora_rank state_size ssm_state_size mamba_d_state mamba_head_dim mamba_d_head "
    "mamba_headdim chunk_size mamba_chunk_size time_step_rank mamba_dt_rank v_head_dim index_head_dim "
    "hidden_size_per_layer_input attention_chunk_size local_attention qkv_head_dim",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length context_length n_ctx",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts num_nextn_predict_layers n_groups mamba_n_groups "
    "mamba_ngroups first_k_dense_replace num_dense_layers",
}
_OFTEN_NONE = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts")
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}


def model_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of a family with every size that it has under a known name made tiny.

    Raises whatever the vendor's class raises for it.
    """
    if model_type in _MADE:
        return _MADE[model_type]()
    return _tiny(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))


def _tiny(kind: Any, own: Mapping[str, Any]) -> Any:
    plain = kind()
    sizes = {name: value for name, value in SIZES.items() if _is_size(plain, name)}
    parts = {
        name: _tiny(type(part), own.get(name, {}))
        for name in getattr(kind, "sub_configs", {})
        if isinstance(part := getattr(plain, name, None), PreTrainedConfig)
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if hasattr(plain, "kv_lora_rank"):
        # Latent attention has keys for each head.
        ids["num_key_value_heads"] = _HEADS
    decoder = {"is_decoder": True} if hasattr(plain, "is_decoder") else {}
    chosen = {name: value for name, value in own.items() if name not in parts}
    return kind(**{**sizes, **parts, **ids, **decoder, **chosen})


def _is_size(config: Any, name: str) -> bool:
    described = getattr(type(config), name, None)
    if isinstance(described, property) and described.fset is None:
        return False
    try:
        value = getattr(config, name, "")
    except ValueError:
        # It has one for each block.
        return True
    return isinstance(value, int | float) or (value is None and name in _OFTEN_NONE)


# What a family needs beside tiny sizes.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
}
_ALL = (0, 1, 2, 3)
_MADE: dict[str, Callable[[], Any]] = {
    "gemma4_text": lambda: GEMMA4_EXPERTS.make(_ALL, 2),
    "qwen4_exp_text": lambda: UNTRIED_FAMILIES["qwen4_exp"].make(_ALL, 3),
}
