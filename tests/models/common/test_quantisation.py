"""8 and 4 bits by bitsandbytes on the CPU, checkpoints that are quantised already, and what this machine cannot do."""

import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationMethod

from experiment_core_utils.config.text import TextConfig, validated
from experiment_core_utils.models.common.quantisation import (
    MOST_4BIT_ERROR,
    bitsandbytes_unsupported_reason,
    error_of_4bit_product,
    fp8_unsupported_reason,
    own_method,
    refuse_wrong_4bit_products,
    supported_types,
    transformers_config,
)
from experiment_core_utils.models.text_model import load_language_model, validate_loadable
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination
from tests.same_floats import assert_same_floats
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

CPU = torch.device("cpu")
HOPPER, AMPERE = (9, 0), (8, 0)
NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_llama(), tmp_path_factory.mktemp("llama"))


def requested(folder: Path, bits: int | None = None, kind: str | None = None, **values: Any) -> TextConfig:
    wanted = {"quantization": bits is not None, "load_in_4bit": bits == 4, "load_in_8bit": bits == 8}
    quantisation = {**wanted, "bnb_4bit_quant_type": kind}
    return validated({"model_name": str(folder), "device": "cpu", "quantization_config": quantisation, **values})


def loaded(config: TextConfig) -> PreTrainedModel:
    return load_language_model(validate_loadable(config))


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("bits", "kind", "packed", "error"),
    [(8, None, 1.0, 0.02), (4, "nf4", 0.5, 0.12), (4, None, 0.5, 0.12), (4, "fp4", 0.5, 0.2)],
)
def test_weights_are_quantised_on_the_cpu_and_the_model_generates(
    llama: Path, bits: int, kind: str | None, packed: float, error: float, precision: str, caplog: Any
) -> None:
    model = loaded(requested(llama, bits, kind, fp_precision=precision))
    weight = model.model.layers[1].mlp.up_proj.weight
    assert weight.element_size() == 1 and weight.numel() == 128 * 64 * packed
    assert model.lm_head.weight.dtype == getattr(torch, precision)
    if bits == 4:
        assert weight.quant_state.quant_type == (kind or "nf4")
    with torch.inference_mode():
        # The product with the unit matrix is the weight that is in force.
        in_force = model.model.layers[1].mlp.up_proj(torch.eye(64, dtype=model.dtype)).float().T
    original = tiny_llama().model.layers[1].mlp.up_proj.weight.detach()
    assert 0 < (in_force - original).norm() / original.norm() < error
    ids = torch.tensor([[5, 9, 30, 31]])
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3).shape == (1, 7)
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING and "bitsandbytes" in each.name]


@NEEDS_BITSANDBYTES
def test_a_checkpoint_saved_in_4_bits_loads_as_it_is_and_no_further(llama: Path, tmp_path: Path) -> None:
    first = loaded(requested(llama, 4))
    first.save_pretrained(tmp_path)
    for file in llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    source = validate_loadable(requested(tmp_path))
    assert source.quant_method == "bitsandbytes"
    ids = torch.tensor([[5, 9, 30]])
    with torch.inference_mode():
        assert_same_floats(loaded(requested(tmp_path))(ids).logits, first(ids).logits)
    for further in (requested(tmp_path, 8), requested(tmp_path, fp_precision="float8")):
        with pytest.raises(ImpossibleCombination, match=r"quantised already \(bitsandbytes\)"):
            validate_loadable(further)


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("gptq", r"quantised with gptq cannot be done here: GPTQ needs the packages gptqmodel and optimum"),
        ("awq", r"quantised with awq cannot be done here: AWQ needs the package gptqmodel"),
        ("fp8", r"quantised with fp8 cannot be done here: float8 needs a GPU"),
    ],
)
@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_a_quantised_checkpoint_without_its_package(llama: Path, tmp_path: Path, method: str, packages: str) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ConfigurationError, match=packages) as caught:
        validate_loadable(requested(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(ImpossibleCombination, match=f"quantised already .{method}."):
        validate_loadable(requested(folder, 4))


@pytest.mark.parametrize(
    ("raw", "method"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": QuantizationMethod.FP8}}, "fp8"),
    ],
)
def test_a_checkpoints_own_method(raw: dict[str, Any], method: str | None) -> None:
    assert own_method(raw) == method


@NEEDS_BITSANDBYTES
def test_the_cpu_has_bitsandbytes_types() -> None:
    assert supported_types(CPU) == {
        "supports_4bit": True,
        "supports_8bit": True,
        "default_4bit_quant_type": "nf4",
        "default_8bit_quant_type": "int8",
    }


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_products_that_are_wrong_are_refused_before_loading(tmp_path: Path, kind: str) -> None:
    layers = [torch.nn.Linear(width, 8, device="meta") for width in (64, 192, 896)]
    refuse_wrong_4bit_products(layers, CPU, kind)
    narrow = save_checkpoint(tiny_llama(hidden_size=48, intermediate_size=80), tmp_path)
    message = f"wrong about {kind} weights of width 48 on cpu: a product is off by .* load in 8 bits"
    if error_of_4bit_product("cpu", 48, kind) < MOST_4BIT_ERROR:
        pytest.skip("this release of bitsandbytes is right about such widths")
    with pytest.raises(ConfigurationError, match=message):
        validate_loadable(requested(narrow, 4, kind))
    validate_loadable(requested(narrow, 8))


@NEEDS_BITSANDBYTES
def test_a_device_that_bitsandbytes_has_no_code_for() -> None:
    nowhere = torch.device("vulkan")
    reason = bitsandbytes_unsupported_reason(nowhere)
    assert reason is not None and reason.startswith("bitsandbytes does not work on vulkan: ")
    assert set(supported_types(nowhere).values()) == {False, None}


@pytest.mark.parametrize(
    ("capability", "message"), [(AMPERE, "this one has 8.0"), (HOPPER, "the package kernels, which is not there")]
)
@pytest.mark.skipif(find_spec("kernels") is not None, reason="kernels is installed")
def test_float8_needs_the_gpu_and_its_kernels(
    capability: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    reason = fp8_unsupported_reason(torch.device("cuda", 0))
    assert reason is not None and message in reason


def test_4_bit_weights_are_multiplied_in_the_requested_precision(llama: Path) -> None:
    wanted = transformers_config(requested(llama, 4), torch.bfloat16)
    assert (wanted.bnb_4bit_compute_dtype, wanted.bnb_4bit_quant_type) == (torch.bfloat16, "nf4")
    assert transformers_config(requested(llama), torch.bfloat16) is None
    assert transformers_config(requested(llama, fp_precision="float8"), torch.bfloat16).weight_block_size == (128, 128)
