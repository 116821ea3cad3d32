"""In: a configuration, a process and a model; out: what a reader needs to assess and repeat the run."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from pydantic_core import from_json, to_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiment_core_utils.b_model_loader import ModelWrapper
from experiment_core_utils.config.text import validated
from experiment_core_utils.meters.host_facts import facts_of_start, hardware_info, host_hardware, run_facts
from experiment_core_utils.models.common.describe import (
    MIB,
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
from experiment_core_utils.models.common.gguf_files import quantised_file_of
from experiment_core_utils.records.provenance import Hardware

TEXT_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "datasets",
    "bitsandbytes",
    "codecarbon",
    "ptflops",
    "nvidia-ml-py",
    "numpy",
    "pandas",
)


def gather_experiment_info(experiment_config: Any, accelerator: Accelerator, experiment_id: str) -> dict[str, Any]:
    """Who runs what, where and when; sizes of memory in 2**30 bytes.

    Published keys: `experiment_id`, `cycle_id`, `timestamp`, `distributed_config` and `hardware_info`. Beside them:
    `command`, `git_commit`, `python`, `versions` (None for a package that is not there), `model` and `data` as
    requested, and under `hardware_info` the CPU's name, CUDA's version and `gpus`, what the driver reports of each GPU
    that this process sees.

    Args:
        experiment_config: in any form that `config.text.validated` takes.
    """
    config = validated(experiment_config)
    return {
        "experiment_id": experiment_id,
        "cycle_id": config.cycle_id,
        **run_facts(TEXT_PACKAGES),
        "distributed_config": {
            "num_processes": accelerator.num_processes,
            "local_process_index": accelerator.local_process_index,
            "device": str(accelerator.device),
            "process_index": accelerator.process_index,
            "mixed_precision": accelerator.mixed_precision,
        },
        "hardware_info": hardware_info(),
        "model": {"name": config.model_name, "revision": config.revision},
        "data": config.prompts.model_dump(),
    }


def get_model_architecture_info(model: nn.Module) -> dict[str, Any]:
    """A loaded model as it is, not as it was requested; size in 2**20 bytes as stored.

    Published keys: `model_class`, `total_parameters`, `trainable_parameters`, `model_size_mb`, `architecture`, `dtype`
    and `device`. Beside them: `dtypes` (stored elements by dtype), attention and experts implementations in force,
    `quantization` in force with the fraction of the parameters that it covers, `device_map` where the model is sharded,
    and the `model_type`, `folder` and hub commit (`revision`) that it was loaded from. `architecture` also contains the
    heads of keys and values, the width of the feed-forward part and the experts; None where the config does not say.

    Args:
        model: transformers' model, also inside `ModelWrapper` or `DistributedDataParallel`.
    """
    while isinstance(model, ModelWrapper | DistributedDataParallel):
        model = model.model if isinstance(model, ModelWrapper) else model.module
    return {
        "model_class": type(model).__name__,
        "total_parameters": count_parameters(model),
        "trainable_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "model_size_mb": stored_bytes(model) / MIB,
        "architecture": architecture_sizes(model),
        "dtype": computing_dtype(model),
        "device": str(next(model.parameters()).device),
        "dtypes": elements_by_dtype(model),
        **implementations(model),
        "quantization": as_json(quantisation_in_force(model)),
        "quantised_file": quantised_file_of(model),
        "device_map": device_map_of(model),
        **origin_of(model),
    }


def gather_experimental_variables(experiment_config: Any) -> dict[str, Any]:
    """Every parameter of a text experiment as requested, JSON values only.

    The published names stand for `fp_precision`, `quantization_config`, `batch_size`, `decoder_config` and
    `latency_simulation`; all others have their own. `num_processes` is the number launched where none was requested.

    Args:
        experiment_config: in any form that `config.text.validated` takes.
    """
    config = validated(experiment_config)
    others = config.model_dump()
    variables = {
        "model_name": others.pop("model_name"),
        "precision": others.pop("fp_precision"),
        "quantization": others.pop("quantization_config"),
        "batch_size": config.batch_size,
        "num_processes": others.pop("num_processes") or int(os.environ.get("WORLD_SIZE", "1")),
        "decoding_config": others.pop("decoder_config"),
        "latency_config": others.pop("latency_simulation"),
        **others,
    }
    return dict(as_json(variables))


def as_json(value: Any) -> Any:
    """The value as JSON stores it: names as keys, lists, numbers; a number that is not finite, and what JSON does not
    know, as its text.
    """
    return from_json(to_json(value, fallback=str, inf_nan_mode="strings"))


def gather_provenance(
    accelerator: Accelerator, device: torch.device, experiment_id: str, started: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Who measured, when, with what: versions, hardware, processes, git commit and command line.

    Args:
        started: `facts_of_start` of the moment at which the run began; None takes this moment.
    """
    return {
        "experiment_id": experiment_id,
        **(started or facts_of_start()),
        "num_processes": accelerator.num_processes,
        "hardware": describe_hardware(device).content(),
    }


def describe_hardware(device: torch.device) -> Hardware:
    """The device and the host, as found; None for what cannot be read."""
    is_cuda = device.type == "cuda"
    return Hardware.of(
        device=str(device),
        gpu_name=torch.cuda.get_device_name(device) if is_cuda else None,
        gpu_memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        **host_hardware().content(),
    )
