"""Counts of a model by hand, packed weights by what they stand for, and what is in force in it."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.config.text import validated
from experiment_core_utils.models.common.describe import (
    architecture_sizes,
    computing_dtype,
    count_parameters,
    device_map_of,
    elements_by_dtype,
    implementations,
    origin_of,
    quantisation_in_force,
    stored_bytes,
)
from experiment_core_utils.models.text_model import load_language_model, validate_loadable
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama, tiny_olmoe

# Embedding and head of 512 rows, one norm. A layer: q and o 64 x 64, k and v 32 x 64, three of 128 x 64, two norms.
LINEAR_OF_A_LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64
LLAMA_PARAMETERS = 2 * 512 * 64 + 64 + 2 * (LINEAR_OF_A_LAYER + 2 * 64)
# The inverse frequencies of the rotary embedding, 8 of them, twice.
BUFFER_BYTES = 2 * 8 * 4
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def quantised(folder: Path, bits: int, kind: str | None = None) -> PreTrainedModel:
    wanted = {"quantization": True, "load_in_4bit": bits == 4, "load_in_8bit": bits == 8, "bnb_4bit_quant_type": kind}
    config = validated({"model_name": str(folder), "device": "cpu", "quantization_config": wanted})
    return load_language_model(validate_loadable(config))


def test_parameters_and_bytes_by_hand() -> None:
    model = tiny_llama()
    assert count_parameters(model) == LLAMA_PARAMETERS == 139584
    assert stored_bytes(model) == 4 * LLAMA_PARAMETERS + BUFFER_BYTES
    assert stored_bytes(model.to(torch.bfloat16)) - BUFFER_BYTES in (2 * LLAMA_PARAMETERS, 2 * LLAMA_PARAMETERS - 32)
    assert count_parameters(tiny_llama(tie_word_embeddings=True)) == LLAMA_PARAMETERS - 512 * 64
    assert elements_by_dtype(model) == {"bfloat16": LLAMA_PARAMETERS}
    assert quantisation_in_force(model) is None


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize(("bits", "kind", "per_byte"), [(8, None, 1), (4, "nf4", 2), (4, "fp4", 2)])
def test_packed_weights_count_by_what_they_stand_for(tmp_path: Path, bits: int, kind: str, per_byte: int) -> None:
    model = quantised(save_checkpoint(tiny_llama(), tmp_path), bits, kind)
    packed = 2 * LINEAR_OF_A_LAYER
    assert count_parameters(model) == LLAMA_PARAMETERS
    assert stored_bytes(model) == 4 * (LLAMA_PARAMETERS - packed) + packed // per_byte + BUFFER_BYTES
    assert computing_dtype(model) == "float32"
    found = quantisation_in_force(model)
    assert found is not None
    assert (found["method"], found["quantised_parameters"]) == ("bitsandbytes", packed)
    assert found["quantised_share"] == packed / LLAMA_PARAMETERS
    assert found["settings"][f"load_in_{bits}bit"] is True
    assert found["settings"].get("bnb_4bit_quant_type") == kind
    other = "bnb_4bit" if bits == 8 else "llm_int8"
    assert not [name for name in found["settings"] if name.startswith(("_", other))]


@NEEDS_BITSANDBYTES
def test_bitsandbytes_leaves_the_experts_alone_and_the_share_says_so(tmp_path: Path) -> None:
    model = quantised(save_checkpoint(tiny_olmoe(), tmp_path), 4)
    found = quantisation_in_force(model)
    # Two layers of q, k, v and o, each 64 x 64.
    assert found is not None and found["quantised_parameters"] == 2 * 4 * 64 * 64
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32
    assert count_parameters(model) == count_parameters(tiny_olmoe())


def test_sizes_come_from_the_decoders_config() -> None:
    llama = dict(architecture_sizes(tiny_llama()))
    assert llama == {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 256, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
        "num_experts": None, "num_experts_per_tok": None, "tie_word_embeddings": False,
    }  # fmt: skip
    olmoe = dict(architecture_sizes(tiny_olmoe()))
    assert (olmoe["num_experts"], olmoe["num_experts_per_tok"]) == (4, 2)
    assert set(architecture_sizes(nn.Linear(2, 2)).values()) == {None}


def test_implementations_in_force() -> None:
    llama = tiny_llama()
    llama.set_attn_implementation("eager")
    assert implementations(llama) == {
        "attn_implementation": "eager",
        "experts_implementation": None,
        "experts_implementation_decode": None,
    }
    olmoe = tiny_olmoe()
    olmoe.set_experts_implementation("batched_mm")
    assert implementations(olmoe)["experts_implementation"] == "batched_mm"


def test_a_model_on_several_devices_says_where_its_parts_lie() -> None:
    model = tiny_llama()
    assert device_map_of(model) is None
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    assert device_map_of(model) == {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}


def test_origin_is_the_folder_and_the_commit_of_a_snapshot(tmp_path: Path) -> None:
    model = tiny_llama()
    assert origin_of(model) == {"model_type": "llama", "folder": None, "revision": None}
    model.name_or_path = str(tmp_path)
    assert origin_of(model) == {"model_type": "llama", "folder": str(tmp_path), "revision": None}
    model.name_or_path = "/cache/models--a--b/snapshots/0123abc"
    assert origin_of(model)["revision"] == "0123abc"


def test_a_model_that_is_not_transformers() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    assert (count_parameters(model), stored_bytes(model), computing_dtype(model)) == (8, 16, "bfloat16")
    assert computing_dtype(nn.ReLU()) is None
