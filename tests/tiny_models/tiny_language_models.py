"""Tiny causal language models in the layout that the hub has, with the embedded model's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM, PreTrainedModel

from experiment_core_utils.primitives.files import EMBEDDED_MODEL

VOCABULARY = 512


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """2 layers of width 64 with 4 heads (2 of keys and values), random weights."""
    torch.manual_seed(11)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def tiny_olmoe() -> PreTrainedModel:
    """2 layers of width 64 with 4 experts (2 of them for a token), random weights."""
    torch.manual_seed(12)
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=0,
        pad_token_id=1,
    )
    return OlmoeForCausalLM(config).eval()


def save_checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    """The model with the embedded tokenizer."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return folder
