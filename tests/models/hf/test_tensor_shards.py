"""Which numbers of processes are refused before a model is loaded, and what each process has of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OlmoeConfig, PreTrainedConfig, PreTrainedModel

from experiment_core_utils.models.hf.tensor_shards import elements_of_each, refuse_uneven_heads
from experiment_core_utils.primitives.errors import ConfigurationError

SIZES = {"hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 97}


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def llama(heads: int, kv_heads: int, **more: object) -> PreTrainedModel:
    return skeleton(LlamaConfig(**SIZES, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8, **more))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "found"),
    [
        (4, 2, 3, "2 and 4 .of queries, keys and values.; give 2"),
        (4, 2, 4, "2 and 4 .of queries, keys and values.; give 2"),
        (12, 6, 5, "6 and 12 .of queries, keys and values.; give 2 or 3 or 6"),
        (6, 1, 2, "1 and 6 .of queries, keys and values.; give --device_map auto"),
        (4, 4, 3, "4 .of queries, keys and values.; give 2 or 4"),
    ],
)
def test_heads_that_the_processes_do_not_divide_are_refused(heads: int, kv_heads: int, size: int, found: str) -> None:
    reason = f"^--tensor_parallel {size}: each process takes whole heads, and the attention of L has {found}$"
    with pytest.raises(ConfigurationError, match=reason):
        refuse_uneven_heads(llama(heads, kv_heads), "L", size)


def test_heads_that_are_divided_evenly_or_not_at_all_pass() -> None:
    """The norms of OLMoE's queries and keys see all heads, so that its products are gathered before."""
    refuse_uneven_heads(llama(6, 3), "L", 3)
    olmoe = OlmoeConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    refuse_uneven_heads(skeleton(olmoe), "O", 3)


def test_a_model_without_a_plan_is_refused() -> None:
    gpt2 = skeleton(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97))
    gpt2.tp_plan = {}
    with pytest.raises(ConfigurationError, match="has no plan to divide a gpt2; give --device_map auto$"):
        refuse_uneven_heads(gpt2, "G", 2)


def test_norms_are_in_each_process_and_products_are_divided() -> None:
    """Of 48 widths: 5 norms stay; of 2 blocks queries and outputs 48 x 32, keys and values 48 x 16, three products of
    48 x 20; embeddings and head 97 x 48.
    """
    whole, divided = 5 * 48, 2 * 48 * (2 * 32 + 2 * 16 + 3 * 20) + 2 * 97 * 48
    model = llama(4, 2)
    assert sum(each.numel() for each in model.parameters()) == whole + divided
    assert elements_of_each(model, 2) == whole + divided // 2
