"""Tiny random models whose configs list something for each block, or whose blocks keep a recurrent state."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from tests.models.knob_families import enlarge_norms
from tests.models.tiny_families import build, config_class

NUM_BLOCKS = 5
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
_CONVOLUTION = ["conv", "full_attention", "conv", "conv", "full_attention"]
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HEADS = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_WINDOW = {**_HEADS, "head_dim": 8, "sliding_window": 4}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def _of(name: str, *parts: dict[str, Any], **chosen: Any) -> Callable[[], Any]:
    def make() -> Any:
        sizes = dict(_SIZES)
        for part in (*parts, chosen):
            sizes |= part
        return config_class(name)(**sizes)

    return make


# Families whose blocks have windows, or are dense and routed, by their place.
LISTED: dict[str, Callable[[], Any]] = {
    "gemma2": _of("Gemma2Config", _WINDOW, layer_types=_WINDOWS, query_pre_attn_scalar=8),
    "gemma3": _of("Gemma3TextConfig", _WINDOW, layer_types=_WINDOWS, query_pre_attn_scalar=8),
    "exaone4": _of("Exaone4Config", _WINDOW, layer_types=_WINDOWS),
    "exaone_moe": _of("ExaoneMoeConfig", _WINDOW, _ROUTED, layer_types=_WINDOWS, num_experts=4, n_group=1),
    "cohere2": _of("Cohere2Config", _WINDOW, layer_types=_WINDOWS),
    "olmo3": _of("Olmo3Config", _WINDOW, layer_types=_WINDOWS),
    "dots1": _of(
        "Dots1Config",
        _WINDOW,
        _ROUTED,
        layer_types=_WINDOWS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "mimo_v2_flash": _of("MiMoV2FlashConfig", _WINDOW, _ROUTED, layer_types=_WINDOWS, n_routed_experts=4, v_head_dim=6),
    "laguna": _of(
        "LagunaConfig", _WINDOW, _ROUTED, layer_types=_WINDOWS, num_experts=4, shared_expert_intermediate_size=12
    ),
    "gpt_oss": _of("GptOssConfig", _WINDOW, layer_types=_WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "afmoe": _of("AfmoeConfig", _WINDOW, _ROUTED, layer_types=_WINDOWS, num_experts=4, num_dense_layers=1),
}
# Families with recurrent blocks whose blocks can be skipped.
RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen3_next": _of(
        "Qwen3NextConfig",
        _HEADS,
        _ROUTED,
        _DELTA,
        layer_types=_LINEAR,
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=12,
    ),
    "qwen3_5_moe": _of(
        "Qwen3_5MoeTextConfig",
        _HEADS,
        _ROUTED,
        _DELTA,
        layer_types=_LINEAR,
        head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=12,
    ),
    "granitemoehybrid": _of(
        "GraniteMoeHybridConfig",
        _HEADS,
        _MAMBA,
        layer_types=_LINEAR,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
    "lfm2": _of("Lfm2Config", _HEADS, layer_types=_CONVOLUTION),
    "lfm2_moe": _of("Lfm2MoeConfig", _HEADS, _ROUTED, layer_types=_CONVOLUTION, num_experts=4, num_dense_layers=1),
    "kimi_linear": _of(
        "KimiLinearConfig",
        _HEADS,
        _ROUTED,
        _LATENT,
        layer_types=_LINEAR,
        num_local_experts=4,
        linear_head_dim=8,
        linear_num_heads=4,
    ),
    "bailing_hybrid": _of(
        "BailingHybridConfig",
        _HEADS,
        _ROUTED,
        _LATENT,
        layer_types=_LINEAR,
        num_local_experts=4,
        n_group=1,
        topk_group=1,
        head_dim=8,
        num_mtp_layers=0,
        first_k_dense_replace=1,
    ),
    "nemotron_h": _of(
        "NemotronHConfig",
        _HEADS,
        layers_block_type=["mamba", "attention", "moe", "mlp", "moe"],
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=12,
    ),
    "olmo_hybrid": _of("OlmoHybridConfig", _HEADS, _DELTA, layer_types=_LINEAR),
    "falcon_mamba": _of("FalconMambaConfig", intermediate_size=24, state_size=8, time_step_rank=4),
    "mamba2": _of("Mamba2Config", state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
}
# Family -> the reason why its blocks cannot be skipped; everything else of it works.
WHOLE: dict[str, tuple[Callable[[], Any], str]] = {
    "jamba": (
        _of(
            "JambaConfig",
            _HEADS,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
        "its config derives layer_types from the places of the blocks",
    ),
    "bamba": (
        _of("BambaConfig", _HEADS, _MAMBA, attn_layer_indices=[1, 4]),
        "its config names blocks by their indices in attn_layer_indices",
    ),
    "zamba2": (
        _of(
            "Zamba2Config",
            _HEADS,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            num_mem_blocks=1,
            attention_head_dim=16,
            mamba_d_state=8,
            n_mamba_heads=2,
            mamba_headdim=32,
            mamba_ngroups=1,
            chunk_size=8,
        ),
        "its blocks keep their number as block_id",
    ),
    "diffllama": (
        _of("DiffLlamaConfig", _HEADS),
        "its blocks have a constant that depends on their number or index (lambda_init)",
    ),
    "minicpm3": (
        _of("MiniCPM3Config", _HEADS, _LATENT, q_lora_rank=12, head_dim=4),
        "its blocks have a constant that depends on their number or index (residual_scale)",
    ),
}
# Family -> why the whole model is refused.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "minimax": (
        _of("MiniMaxConfig", _HEADS, layer_types=_LINEAR, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
        "it has its own kind of cache",
    ),
    "recurrent_gemma": (
        _of("RecurrentGemmaConfig", _HEADS, lru_width=32, attention_window_size=4),
        "its blocks keep the state of a request in themselves and not in the cache",
    ),
}


def built(make: Callable[[], Any]) -> PreTrainedModel:
    """A random model, the same at every call; skips where this version of transformers has no such family."""
    model = enlarge_norms(build(make()))
    assert isinstance(model, PreTrainedModel)
    return model
