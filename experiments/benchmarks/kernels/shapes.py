"""The shapes that the harness measures: sizes of four published models, and the same families tiny.

Weights are random. The sizes are those of the `config.json` of each model on huggingface.co.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from experiment_core_utils.models.hf.loader import random_model
from experiment_core_utils.models.molmoe import MolmoeConfig
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.molmoe_1b import shape_config, tiny_config

MOLMOE = "molmoe_1b"
# The repository of each shape.
SOURCES = {
    MOLMOE: "allenai/MolmoE-1B-0924",
    "llama_3_2_1b": "meta-llama/Llama-3.2-1B",
    "olmoe_1b_7b": "allenai/OLMoE-1B-7B-0924",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
}
_SIZES: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama_3_2_1b": (LlamaConfig, {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    }),
    "olmoe_1b_7b": (OlmoeConfig, {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "qwen3_30b_a3b": (Qwen3MoeConfig, {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "moe_intermediate_size": 768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }),
}  # fmt: skip
# Heads of 32, which all kernels take; large weights, so that logits are not all the same.
_TINY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 8,
    "num_experts_per_tok": 4, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "initializer_range": 0.2, "eos_token_id": 2,
}  # fmt: skip
_NEW = ("initializer_range", "eos_token_id")
# What is run where the flags do not say.
REQUESTS = {
    "published": {"prompt_tokens": 1053, "crops": 13, "decode_steps": 32},
    "tiny": {"prompt_tokens": 12, "crops": 2, "decode_steps": 4},
}


def config_of(model: str, shape: str) -> PreTrainedConfig:
    """The config of `NAME` or `NAME:BLOCKS`, the latter with its first blocks alone.

    Raises:
        ConfigurationError: no shape has that name, or it has not so many blocks.
    """
    name, _, blocks = model.partition(":")
    if name not in SOURCES:
        raise ConfigurationError(f"--model {model} is unknown; give one of {', '.join(SOURCES)}, or NAME:BLOCKS")
    config_class, sizes = _SIZES["olmoe_1b_7b" if name == MOLMOE else name]
    if shape == "tiny":
        sizes = {**sizes, **{key: value for key, value in _TINY.items() if key in {*sizes, *_NEW}}}
    config = config_class(**sizes)
    if name == MOLMOE:
        config = tiny_config(config) if shape == "tiny" else shape_config(MOLMOE)
    text = config.get_text_config(decoder=True)
    if blocks:
        if not blocks.isdecimal() or not 1 <= int(blocks) <= text.num_hidden_layers:
            raise ConfigurationError(f"--model {model}: give 1 to {text.num_hidden_layers} blocks after the colon")
        text.num_hidden_layers = int(blocks)
    return config


def random_weights(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A random model, the same one in each process on a device; norms and biases are random, too, so that nothing is
    multiplied by one or added as zero.
    """
    auto_class = AutoModelForImageTextToText if isinstance(config, MolmoeConfig) else AutoModelForCausalLM
    model: PreTrainedModel = random_model("the shape", auto_class, config, device, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.02)
    return model
