"""Random causal language models small enough to count by hand: 2 blocks, width 32, vocabulary 64."""

import torch
from transformers import LlamaConfig, MixtralConfig, OlmoeConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 0, "bos_token_id": 1}


def llama_config() -> PreTrainedConfig:
    """4 heads of width 8 on 2 key-value heads, gated MLP of 48."""
    return LlamaConfig(**SIZES, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)


def olmoe_config(top_k: int = 4) -> PreTrainedConfig:
    """2 heads of width 16, 8 experts of 16."""
    return OlmoeConfig(
        **SIZES, intermediate_size=16, num_attention_heads=2, num_experts=8, num_experts_per_tok=top_k, pad_token_id=0
    )


def mixtral_config() -> PreTrainedConfig:
    """4 heads of width 8 on 2 key-value heads, 4 experts of 48, of which 2."""
    return MixtralConfig(
        **SIZES,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )


def causal_model(config: PreTrainedConfig) -> torch.nn.Module:
    """With random weights, on the CPU."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def llama_flops(tokens: int) -> int:
    """Of `llama_config`, logits at every position."""
    # Query and output 32 x 32, key and value 32 x 16 (2 heads of 8), three matrices of 32 x 48.
    projections = 2 * tokens * (2 * 32 * 32 + 2 * 32 * 16)
    attention = 4 * tokens * tokens * 32
    mlp = 2 * tokens * 3 * 32 * 48
    head = 2 * 32 * 64 * tokens
    return 2 * (projections + attention + mlp) + head


def olmoe_flops(tokens: int, top_k: int = 4) -> int:
    """Of `olmoe_config`, logits at every position."""
    projections = 2 * tokens * 4 * 32 * 32
    attention = 4 * tokens * tokens * 32
    router = 2 * tokens * 32 * 8
    experts = 2 * tokens * top_k * 3 * 32 * 16
    return 2 * (projections + attention + router + experts) + 2 * 32 * 64 * tokens
