"""In: a model and inputs, or a device; out: floating-point operations, memory and utilisation.

Operations follow from formulas where the architecture is known, because they must move with every knob at no cost; any
other model is counted by running it once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

from experiment_core_utils.config.text import validated
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.models.costs.prompt_flops import FlopMethod, count_prompt_flops
from experiment_core_utils.models.interface import Runnable
from experiment_core_utils.primitives.device import gpu_uuid, resident_bytes
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.records.compute import ComputeUtilisation, LoadSample, LoadTrace, utilisation_of
from experiment_core_utils.records.requests import RequestShape, StageFlops, TokenisedPrompts
from experiment_core_utils.records.text import ComputeMetrics, GpuMemory, InferenceResults, ProcessPlace, all_absent
from experiment_core_utils.text_run.generated_compute import text_memory


def request_flops(
    model: Runnable,
    setting: Setting,
    shape: RequestShape,
    output_tokens: int,
    scored: Sequence[tuple[int, Sequence[int]]] = (),
) -> StageFlops | None:
    """Operations of each stage of a request at a setting, by formula; None where the architecture is not known.

    Args:
        scored: tokens of each prompt whose continuations are scored, the request's own first, and of each of these. All
            belong to the prefill then, and are counted as steps, whether they ran as steps or in one pass.
    """
    if not scored:
        return model.count_flops(setting, shape, output_tokens)
    own = model.count_flops(setting, shape, 1)
    total = 0.0
    for place, (prompt_tokens, lengths) in enumerate(scored):
        of_prompt = shape if place == 0 else replace(shape, text_tokens=prompt_tokens)
        for length in lengths:
            found = model.count_flops(setting, of_prompt, length)
            if own is None or found is None:
                return None
            total += (found.decode_flops_per_token or 0) * (length - 1)
        if place and own is not None and found is not None:
            total += found.prefill_flops
    return (
        None
        if own is None
        else replace(own, prefill_flops=own.prefill_flops + round(total), decode_flops_per_token=None)
    )


def get_flops(
    model: nn.Module,
    input_ids: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "formula",
) -> float | None:
    """`count_prompt_flops` as a number alone; None where it could not be counted."""
    return count_prompt_flops(model, input_ids, timeout_per_sample, method).flops


def get_memory(device: torch.device) -> GpuMemory:
    """torch's allocator on `device`, in bytes: now, and the most since its peaks were last reset.

    All None on the CPU, where torch keeps no such figures. Not counted: the CUDA context, and other libraries' memory.
    """
    if device.type != "cuda":
        return all_absent(GpuMemory, reason=f"{device} is not a GPU: torch records no such figures there")
    return GpuMemory(
        gpu_current_memory_allocated_bytes=torch.cuda.memory_allocated(device),
        gpu_max_memory_allocated_bytes=torch.cuda.max_memory_allocated(device),
        gpu_current_memory_reserved_bytes=torch.cuda.memory_reserved(device),
        gpu_max_memory_reserved_bytes=torch.cuda.max_memory_reserved(device),
        reason=None,
    )


def get_gpu_cpu_utilisation(device: torch.device) -> ComputeUtilisation:
    """Utilisation now: of the GPU over the driver's last sampling period, of all CPUs since the previous call.

    The first call in a process looks back to when psutil was imported. `gpu_utilization_percent` has the figure of
    `device` alone, and none on the CPU or where the driver does not report it. For figures of a window: `LoadSampler`.
    """
    uuid, percents = gpu_uuid(device), tuple[float, ...]()
    reason = f"{device} is not a GPU" if uuid is None else None
    try:
        percents = () if uuid is None else (NvmlGpu(uuid).utilisation_percent(),)
    except MeterUnavailable as error:
        reason = str(error)
    now = LoadSample(0.0, 0.0, psutil.cpu_percent(interval=None), percents, resident_bytes(), None, None)
    return {**utilisation_of(LoadTrace((now,), 0.0, reason)), "num_samples": 0, "sample_interval_s": None}


def combine_comp_metrics(
    model: nn.Module,
    device: torch.device,
    tokenised_input_ids: torch.Tensor | TokenisedPrompts,
    accelerator: ProcessPlace,
    experiment_config: Any,
    results: InferenceResults | None = None,
    load: LoadTrace | None = None,
) -> ComputeMetrics:
    """FLOPs of one forward pass over all prompts given, whichever process runs them, and this process's figures.

    Memory is read before counting, which may itself run the model. See `count_prompt_flops` for what the FLOPs count;
    method and time limit are `flops_method` and `flops_timeout_s` of the configuration. FLOPs of what was generated:
    `generation_metrics`.

    Args:
        results: what this process generated, which shows how large its cache was; None leaves the cache's bytes out.
        load: of the window in which it was generated; None reads utilisation now.

    Raises:
        ConfigurationError: a value of the configuration is not allowed, or as `count_prompt_flops`.
    """
    config = validated(experiment_config)
    memory = get_memory(device)
    parts = text_memory(model, device, config.mixed_precision, results, memory["gpu_max_memory_allocated_bytes"])
    utilisation = get_gpu_cpu_utilisation(device) if load is None else utilisation_of(load)
    counted = count_prompt_flops(model, tokenised_input_ids, config.flops_timeout_s, config.flops_method)
    return ComputeMetrics(
        flops=counted.flops,
        memory={**memory, **parts},
        compute_utilisation=utilisation,
        flops_method=counted.method,
        flops_counted_on=counted.counted_on,
        flops_prompts=counted.num_prompts,
        flops_tokens=counted.num_tokens,
        flops_per_prompt=None if counted.flops is None else counted.flops / counted.num_prompts,
        flops_per_token=None if counted.flops is None else counted.flops / counted.num_tokens,
        flops_reason=counted.reason,
        process_index=accelerator.process_index,
    )
