"""What a model needs beside what a device has, in numbers worked out by hand, and the ways out that are named."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig

from experiment_core_utils.models.costs.memory_check import Loading, ModelSizes, Room, memory_lines
from experiment_core_utils.primitives.errors import ConfigurationError

CPU = torch.device("cpu")
FLAGS = {"bfloat16": "--precision bfloat16", "device_map": "--device_map auto"}
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
BITS = {"8bit": "--quantization 8bit", "4bit": "--quantization 4bit"}
# One of 5 rows and a head of its own: 3 x 5 of each, beside one block of width 3 without biases.
LLAMA = LlamaConfig(
    vocab_size=5,
    hidden_size=4,
    intermediate_size=3,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)
# Queries and outputs 4 x 4, keys and values 4 x 2, gate, up and down 4 x 3; norms 4 each, embedding and head 5 x 4.
LINEAR = 2 * (2 * 16 + 2 * 8 + 3 * 12)
OTHERS = 2 * 2 * 4 + 4 + 2 * 20


def skeleton(config: LlamaConfig | OlmoeConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def sizes_of(config: LlamaConfig | OlmoeConfig) -> ModelSizes:
    return ModelSizes.of(skeleton(config))


def loading(room: Room, **changed: object) -> Loading:
    return replace(Loading("m", LLAMA, torch.float32, CPU, room, tokens=0), **changed)


def test_quantisation_changes_linear_layers_and_not_the_head() -> None:
    sizes = sizes_of(LLAMA)
    assert sizes.elements == LINEAR + OTHERS
    assert sizes.weights_bytes(torch.bfloat16) == 2 * (LINEAR + OTHERS)
    assert sizes.weights_bytes(torch.float32, "8bit") == LINEAR + 4 * OTHERS
    # A float32 for 64 weights of half a byte.
    assert sizes.weights_bytes(torch.float32, "4bit") == round(LINEAR * (0.5 + 1 / 16)) + 4 * OTHERS


def test_bitsandbytes_leaves_experts_as_they_are_and_float8_does_not() -> None:
    """Of 3 experts of width 5 in blocks of width 4: gate, up and down are 4 x 5 each."""
    config = OlmoeConfig(
        vocab_size=5,
        hidden_size=4,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=3,
        num_experts_per_tok=1,
    )
    sizes, experts = sizes_of(config), 2 * 3 * 3 * 20
    # Four projections of 4 x 4 in each block; the router is a parameter of its own.
    linear = 2 * 4 * 16
    assert sizes.expert_elements == experts
    assert sizes.weights_bytes(torch.bfloat16, "8bit") == 2 * (sizes.elements - linear) + linear
    assert sizes.weights_bytes(torch.bfloat16, "float8") == 2 * (sizes.elements - linear - experts) + linear + experts


def test_a_need_is_weights_a_tenth_of_them_and_the_cache() -> None:
    """Of a token, keys and values of one head of 2 in 2 blocks: 8 numbers."""
    need = loading(Room("cpu", 0, 0), rows=3, tokens=7).need_bytes(sizes_of(LLAMA))
    assert need == round(4 * (LINEAR + OTHERS) * 1.1) + 3 * 7 * 8 * 4


def test_a_line_says_what_is_missing_and_names_only_what_helps() -> None:
    sizes = ModelSizes(10 * 10**9)
    assert memory_lines(sizes, loading(Room("cpu", 44 * 10**9, 44 * 10**9)), FLAGS) == []
    # 44 GB in float32, 22 GB in bfloat16.
    enough, little = (Room("cpu", free, 60 * 10**9) for free in (23 * 10**9, 21 * 10**9))
    line = "m needs 44 GB in float32, cpu has 23 GB free; use --precision bfloat16"
    assert memory_lines(sizes, loading(enough), FLAGS) == [line]
    assert memory_lines(sizes, loading(little), FLAGS) == [
        "m needs 44 GB in float32, cpu has 21 GB free; use a smaller model"
    ]
    spread = loading(little, spread_room=lambda: Room("cuda:0 + cpu", 45 * 10**9, 60 * 10**9))
    assert memory_lines(sizes, spread, FLAGS)[0].endswith("; use --device_map auto")
    assert memory_lines(sizes, loading(little, dtype=torch.bfloat16), FLAGS)[0].endswith("; use a smaller model")


def test_only_weights_larger_than_all_memory_are_refused() -> None:
    """40 GB of weights: with their margin more than 42 GB, which are not free, but can be."""
    sizes = ModelSizes(10 * 10**9)
    assert memory_lines(sizes, loading(Room("cpu", 10**9, 40 * 10**9)), FLAGS)
    with pytest.raises(ConfigurationError, match="^m needs 44 GB in float32, cpu has 1 GB free; use a smaller model$"):
        memory_lines(sizes, loading(Room("cpu", 10**9, 40 * 10**9 - 1)), FLAGS)


def test_processes_with_memory_of_their_own_need_a_part_each() -> None:
    """Of 40 GB a quarter and a tenth of that; bitsandbytes does not cut weights into parts."""
    sizes, few = ModelSizes(10 * 10**9, [nn.Linear(10**5, 10**5, device="meta")]), Room("cuda:0", 10**9, 60 * 10**9)
    assert memory_lines(sizes, loading(few, shards=4), FLAGS | BITS) == [
        "m needs 11 GB in float32, cuda:0 has 1 GB free; use a smaller model"
    ]
    assert memory_lines(sizes, loading(Room("cuda:0", 11 * 10**9, 60 * 10**9), shards=4), FLAGS) == []


def test_weights_that_are_quantised_already_are_as_large_as_their_files() -> None:
    sizes = ModelSizes(10 * 10**9, stored_bytes=5 * 10**9)
    found = memory_lines(sizes, loading(Room("cpu", 10**9, 60 * 10**9)), FLAGS)
    assert found == ["m needs 5.5 GB in float32, cpu has 1 GB free; use a smaller model"]


@NEEDS_BITSANDBYTES
def test_quantisation_is_advised_where_it_helps_and_multiplies_right() -> None:
    """Of a layer of 64 x 10^6: 256 MB, with 8 bits 64 MB, with 4 bits 36 MB, each with a tenth."""
    with torch.device("meta"):
        layer = nn.Linear(64, 10**6, bias=False)
    sizes = ModelSizes(64 * 10**6, [layer])

    def advice(free: int) -> str:
        (line,) = memory_lines(sizes, loading(Room("cpu", free, 10**9)), FLAGS | BITS)
        return line.partition("; use ")[2]

    assert advice(200 * 10**6) == "--precision bfloat16 / --quantization 8bit / --quantization 4bit"
    assert advice(80 * 10**6) == "--quantization 8bit / --quantization 4bit"
    assert advice(45 * 10**6) == "--quantization 4bit"
    assert advice(30 * 10**6) == "a smaller model"


def test_quantised_weights_are_an_estimate_which_refuses_nothing() -> None:
    sizes, none = sizes_of(LLAMA), Room("cpu", 1, 1)
    with pytest.raises(ConfigurationError, match="^m needs "):
        memory_lines(sizes, loading(none), {})
    for own in (loading(none, quantisation="4bit"), loading(none)):
        stored = sizes if own.quantisation == "4bit" else replace(sizes, stored_bytes=100)
        (line,) = memory_lines(stored, own, {})
        assert line.startswith("m needs ") and line.endswith("; use a smaller model")
