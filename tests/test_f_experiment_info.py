"""What is recorded about a run, and that it is what was found."""

import json
import math
import platform
import sys
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from accelerate import Accelerator

from experiment_core_utils import __version__
from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.b_model_loader import ModelWrapper, load_model_tokenizer
from experiment_core_utils.config.text import TextConfig, published_form
from experiment_core_utils.f_experiment_info import (
    describe_hardware,
    gather_experiment_info,
    gather_experimental_variables,
    gather_provenance,
    get_model_architecture_info,
)
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from tests.tiny_models.tiny_language_models import save_checkpoint, tiny_llama

CPU = torch.device("cpu")


def test_provenance_holds_every_key_and_goes_into_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["acc_lat_profiling.py", "--model_path", "a folder"])
    found = gather_provenance(Accelerator(cpu=True), CPU, "0042")
    assert list(found) == [
        "experiment_id", "timestamp", "command", "git_commit", "python", "versions", "num_processes", "hardware",
    ]  # fmt: skip
    assert found["experiment_id"] == "0042"
    assert found["command"].endswith(" acc_lat_profiling.py --model_path 'a folder'")
    assert found["num_processes"] == 1
    assert found["python"] == platform.python_version()
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert all(found["versions"].values()) and found["versions"]["inference-knob-profiler"] == __version__
    age = datetime.now(UTC) - datetime.fromisoformat(found["timestamp"])
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert json.loads(json.dumps(found)) == found


def test_a_cpu_has_no_gpu_figures() -> None:
    found = describe_hardware(CPU).content()
    assert (found["device"], found["gpu_name"], found["gpu_memory_bytes"]) == ("cpu", None, None)
    assert found["cpu_count"] >= 1
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["ram_bytes"] > 100 * 2**20
    assert set(found) == {
        "device", "gpu_name", "gpu_memory_bytes", "cuda", "num_gpus", "cpu", "cpu_count", "cpu_quota", "torch_threads",
        "ram_bytes",
    }  # fmt: skip


# --- text experiments -----------------------------------------------------------------------------------------------


def test_experiment_info_holds_the_published_keys_and_goes_into_json() -> None:
    config = published_form(device="cpu", cycle_id=3, mixed_precision="bf16", prompts={"path": "p.txt"})
    found: Any = gather_experiment_info(config, setup_distributed(config), "0042")
    assert (found["experiment_id"], found["cycle_id"]) == ("0042", 3)
    place = found["distributed_config"]
    assert (place["num_processes"], place["local_process_index"], place["device"]) == (1, 0, "cpu")
    assert place["mixed_precision"] == "bf16"
    hardware = found["hardware_info"]
    assert hardware["num_gpus"] == len(hardware["gpu_names"]) == len(hardware["gpus"]) == torch.cuda.device_count()
    assert hardware["cuda_available"] == torch.cuda.is_available()
    assert hardware["total_ram_gb"] == psutil.virtual_memory().total / 2**30
    assert found["versions"]["transformers"] == transformers.__version__
    assert {"tokenizers", "bitsandbytes", "codecarbon", "pandas"} <= set(found["versions"])
    assert found["model"] == {"name": str(EMBEDDED_MODEL), "revision": None}
    assert (found["data"]["path"], found["data"]["revision"]) == ("p.txt", None)
    assert found["python"] == platform.python_version()
    age = datetime.now(UTC) - datetime.fromisoformat(found["timestamp"])
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    setup_distributed({"device": "cpu"})


def test_model_architecture_info_of_a_plain_and_a_wrapped_model(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_llama(), tmp_path)
    model, _ = load_model_tokenizer({"model_name": str(folder), "device": "cpu", "fp_precision": "bfloat16"})
    found: Any = get_model_architecture_info(model)
    # See tests/models/common/test_describe.py for the arithmetic.
    assert (found["model_class"], found["total_parameters"]) == ("LlamaForCausalLM", 139584)
    assert found["trainable_parameters"] == 139584
    assert found["model_size_mb"] == pytest.approx(2 * 139584 / 2**20, abs=1e-4)
    assert (found["dtype"], found["device"]) == ("bfloat16", "cpu")
    assert found["architecture"]["num_layers"] == 2
    assert (found["attn_implementation"], found["quantization"], found["device_map"]) == ("sdpa", None, None)
    assert (found["model_type"], found["folder"], found["revision"]) == ("llama", str(folder), None)
    assert get_model_architecture_info(ModelWrapper(model)) == found
    assert json.loads(json.dumps(found)) == found


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_quantisation_in_force_goes_into_json(tmp_path: Path) -> None:
    values = {"model_name": str(save_checkpoint(tiny_llama(), tmp_path)), "device": "cpu"}
    wanted = {"quantization": True, "load_in_4bit": True}
    found: Any = get_model_architecture_info(load_model_tokenizer({**values, "quantization_config": wanted})[0])
    assert found["quantization"]["settings"]["bnb_4bit_quant_type"] == "nf4"
    assert type(found["quantization"]["settings"]["quant_method"]) is str
    assert json.loads(json.dumps(found)) == found


def test_the_embedded_language_model_is_distinguished_from_the_whole() -> None:
    found: Any = get_model_architecture_info(load_model_tokenizer({"device": "cpu"})[0])
    assert (found["model_class"], found["architecture"]["num_experts"]) == ("MolmoeForCausalLM", 16)
    assert found["experts_implementation"] == found["experts_implementation_decode"] == "grouped_mm"


def test_variables_hold_every_parameter_under_its_name() -> None:
    wanted = {"quantization": True, "load_in_4bit": True}
    config = published_form(
        fp_precision="bfloat16", quantization_config=wanted, batching_options={"batch_size___fixed_batching": 4}
    )
    config.rental = {"place": Path("here"), "price": math.nan, "days": (1, 2)}
    found: Any = gather_experimental_variables(config)
    renamed = {"fp_precision", "quantization_config", "decoder_config", "latency_simulation"}
    published = {"precision", "quantization", "batch_size", "decoding_config", "latency_config"}
    assert set(found) == (set(TextConfig.model_fields) - renamed) | published
    assert (found["precision"], found["batch_size"], found["num_processes"]) == ("bfloat16", 4, 1)
    assert found["quantization"]["load_in_4bit"] is True
    assert found["decoding_config"]["decoding_mode"] == "greedy"
    assert found["latency_config"]["simulate"] is False
    assert found["further"] == {"rental": {"place": "here", "price": "NaN", "days": [1, 2]}}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    adaptive = published_form(batching_options={"adaptive_batching": True})
    assert gather_experimental_variables(adaptive)["batch_size"] is None
