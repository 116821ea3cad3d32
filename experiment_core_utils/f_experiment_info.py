"""In: a configuration, a process and a model; out: what a reader needs to assess and repeat the run."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from pydantic import BaseModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiment_core_utils.b_model_loader import ModelWrapper
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.config.text import validated
from experiment_core_utils.knobs.block_choice import BlockChoice
from experiment_core_utils.knobs.registry import all_knobs
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
from experiment_core_utils.primitives.texts import without_secrets
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.provenance import Hardware, Variables
from experiment_core_utils.records.text import ExperimentalVariables, ExperimentInfo, ModelArchitectureInfo
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.sampling import inspected

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
_COMMIT = re.compile(r"[0-9a-f]{40}")


def gather_experiment_info(experiment_config: Any, accelerator: Accelerator, experiment_id: str) -> ExperimentInfo:
    """Who runs what, where and when; sizes of memory in 2**30 bytes.

    Beside the published keys: `command`, `git_commit`, `python`, `versions` (None for a package that is not there),
    `model` and `data` as requested, and under `hardware_info` the CPU's name, CUDA's version and `gpus`, what the
    driver reports of each GPU that this process sees.

    Args:
        experiment_config: in any form that `config.text.validated` takes.
    """
    config = validated(experiment_config)
    info = {
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
    return cast(ExperimentInfo, info)


def get_model_architecture_info(model: nn.Module) -> ModelArchitectureInfo:
    """A loaded model as it is, not as it was requested; size in 2**20 bytes as stored.

    Beside the published keys: `dtypes` (stored elements by dtype), attention and experts implementations in force,
    `quantization` in force with the fraction of the parameters that it covers, `device_map` where the model is sharded,
    and the `model_type`, `folder` and hub commit (`revision`) that it was loaded from. `architecture` also contains the
    heads of keys and values, the width of the feed-forward part and the experts; None where the config does not say.

    Args:
        model: transformers' model, also inside `ModelWrapper` or `DistributedDataParallel`.
    """
    while isinstance(model, ModelWrapper | DistributedDataParallel):
        model = model.model if isinstance(model, ModelWrapper) else model.module
    info = {
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
    return cast(ModelArchitectureInfo, info)


def gather_experimental_variables(experiment_config: Any) -> ExperimentalVariables:
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
    return cast(ExperimentalVariables, as_json(variables))


def as_json(value: Any) -> Any:
    """The value as JSON stores it: mappings with names as keys, lists, numbers; what JSON does not know as its text."""
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(each) for each in value]
    is_plain = (
        value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_plain else str(value)


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


def variables_of(config: ProfilingConfig, max_new_tokens: int, choice: BlockChoice) -> Variables:
    """The experimental parameters as requested; `max_new_tokens` and the choice of blocks as they came out."""
    parts = (config.task, config.model, config.knobs, config.measuring, config.machine)
    found = {name: value for part in parts for name, value in part if name in Variables.model_fields}
    return Variables.of(
        **found
        | {
            "endpoint": shown_endpoints(config.model.endpoint),
            "model": list(config.model.model) if config.model.model is not None else None,
            "knob_flags": knob_flags(config.knobs),
            "ids": list(config.task.ids) if config.task.ids is not None else None,
            "columns": config.task.named_columns,
            "max_new_tokens": max_new_tokens,
            "batch_size": 1,
            "decoding": "greedy",
            "importance_scores_file": str(choice.file) if choice.scores is not None else None,
            "block_sets_file": str(choice.file) if choice.sets is not None else None,
            "sample_timeout_s": config.measuring.sample_timeout,
            "profiler": config.measuring.profiler,
            "first_block_top_k_rule": "the first block with experts keeps the model's own top-k",
        }
    )


def shown_endpoints(given: Any) -> Any:
    """The addresses of `--endpoint` as records show them; anything else as it is."""
    return [without_secrets(str(each)) for each in given] if isinstance(given, list | tuple) else given


def knob_flags(given: BaseModel) -> dict[str, Any]:
    """Flags of the knobs that are no lists of values and no files and not at their default, such as a rule."""
    return {
        name: value
        for knob in all_knobs()
        for name, value in knob.flags_beside_values(given)
        if not isinstance(value, Path)
    }


def caveats_of(
    random_weights: bool, device: torch.device, processes_here: int, data_source: Mapping[str, str]
) -> list[Caveat]:
    """What a reader must know before quoting the numbers.

    Args:
        data_source: the task's `source`.
    """
    caveats = []
    if data_source.get("read_from") == "hub" and not _COMMIT.fullmatch(data_source["revision"]):
        caveats.append(caveat("data_commit_unknown"))
    if "left_out" in data_source:
        caveats.append(caveat("task_decoding_left_out", names=data_source["left_out"]))
    if random_weights:
        caveats.append(caveat("random_weights"))
    return [*caveats, *shared_cores_caveats(device, processes_here)]


def shared_cores_caveats(device: torch.device, processes_here: int) -> list[Caveat]:
    """The caveat of a run on the CPU of which several processes are on this machine; none otherwise."""
    if device.type != "cpu" or processes_here == 1:
        return []
    return [caveat("shared_cores", num_processes=processes_here)]


def crowded_cores_caveats(device: torch.device, processes_here: int, cores: float) -> list[Caveat]:
    """The caveat of a run on the CPU whose processes on this machine have more threads than cores; none otherwise.

    Args:
        cores: `usable_cores` of all of them.
    """
    threads = processes_here * torch.get_num_threads()
    is_crowded = device.type == "cpu" and threads > cores
    return [caveat("crowded_cores", num_threads=threads, num_cores=cores)] if is_crowded else []


def picture_caveats(task: Task, sample_ids: Sequence[int], takes_pictures: bool) -> list[Caveat]:
    """The caveat where a text model gets a task with pictures, by the first few samples that can be read."""
    if takes_pictures:
        return []
    if all(sample.image is None for sample in inspected(task, sample_ids)):
        return []
    return [caveat("pictures_not_shown")]


def batching_caveats(num_samples: int, num_latency_samples: int | None, dtype: str | None) -> list[Caveat]:
    """What a reader must know where samples are answered in batches in another precision than float32.

    Args:
        dtype: None where a server answers, whose batches are not seen.
    """
    if num_latency_samples is None or num_latency_samples >= num_samples or dtype in ("float32", None):
        return []
    answered = num_samples - num_latency_samples
    return [caveat("batched_answers", num_batched=answered, num_samples=num_samples, dtype=dtype)]
