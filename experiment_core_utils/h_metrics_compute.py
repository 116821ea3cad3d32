"""In: a model and inputs, or a device; out: floating-point operations, memory and utilisation.

The figures of a staged run come from formulas in the model's own folder (`count_flops` there), because they must move
with every knob at no cost. What stands here counts any model by running it once.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import psutil
import torch
from torch import nn

from experiment_core_utils.meters.flop_counter import count_flops, count_with_ptflops, is_quantised, meta_twin
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.primitives.device import gpu_uuid, out_of_memory_named
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    OutOfMemory,
    SampleTimedOut,
    first_line,
)
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.records import (
    ComputeMetrics,
    ComputeUtilisation,
    FlopCount,
    GpuMemory,
    ProcessPlace,
    TokenisedPrompts,
)
from experiment_core_utils.primitives.text_config import judged

FlopMethod = Literal["counter", "ptflops"]
_METHODS = ("counter", "ptflops")


def get_flops(
    model: nn.Module,
    input_ids: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "counter",
) -> float | None:
    """`count_prompt_flops` as a number alone; None where it could not be counted."""
    return count_prompt_flops(model, input_ids, timeout_per_sample, method).flops


def count_prompt_flops(
    model: nn.Module,
    tokenised: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "counter",
) -> FlopCount:
    """Operations of one forward pass of each prompt by itself, summed: no padding, logits at every position.

    One prompt of each length is run, and counts as often as the length occurs. Not counted: tokens that are generated
    afterwards, elementwise work, norms, look-ups. Attention counts as the full rectangle. A model with packed weights
    is counted on a twin of its architecture without weights, so that it has the FLOPs of full precision.

    Args:
        model: anything with `forward(input_ids=[1, T])`.
        tokenised: ids [N, T] without padding, or ids and mask, both [N, T]; masked positions are left out.
        timeout_per_sample: seconds for one length; None sets no limit.
        method: `counter` is torch's with the formulas that it lacks; `ptflops` leaves out fused attention and experts.

    Raises:
        ConfigurationError: another method, ids that are not [N, T], a prompt without a token, or a time limit outside
            the main thread.
    """
    if method not in _METHODS:
        raise ConfigurationError(f"FLOPs cannot be counted by {method!r}; choose one of {', '.join(_METHODS)}")
    ids, mask = _ids_and_mask(tokenised)
    lengths = [int(length) for length in mask.sum(dim=1)]
    counted_on = "meta_twin" if is_quantised(model) else "model"
    flops, reason = None, "there is no prompt" if not lengths else None
    if lengths:
        samples = {length: ids[row][mask[row]].unsqueeze(0) for row, length in enumerate(lengths)}
        try:
            flops = _count_lengths(model, samples, Counter(lengths), timeout_per_sample, method)
        except (MeterUnavailable, OutOfMemory, SampleTimedOut) as error:
            reason = str(error)
    return FlopCount(flops, method, counted_on, len(lengths), sum(lengths), reason)


def _ids_and_mask(tokenised: torch.Tensor | TokenisedPrompts) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(tokenised, Mapping):
        ids, mask = tokenised["input_ids"], tokenised["attention_mask"].bool()
    else:
        ids, mask = tokenised, torch.ones_like(tokenised, dtype=torch.bool)
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ConfigurationError(
            f"ids and mask of shape [N, T] were expected, found {list(ids.shape)} and {list(mask.shape)}"
        )
    empty = [str(row) for row, any_token in enumerate(mask.any(dim=1)) if not any_token]
    if empty:
        raise ConfigurationError(f"prompt {', '.join(empty)} has no token; leave it out")
    return ids, mask


def _count_lengths(
    model: nn.Module,
    samples: Mapping[int, torch.Tensor],
    times: Mapping[int, int],
    timeout_s: float | None,
    method: FlopMethod,
) -> float:
    """Raises MeterUnavailable, OutOfMemory or SampleTimedOut."""
    counted = meta_twin(model) if is_quantised(model) else model
    total = 0
    for length, sample in samples.items():
        where = next((parameter.device for parameter in counted.parameters()), sample.device)
        try:
            with out_of_memory_named(), time_limit(timeout_s):
                total += times[length] * _count(counted, sample.to(where), method)
        except SampleTimedOut as error:
            raise SampleTimedOut(f"a prompt of {length} tokens was {error}") from error
        except (NotImplementedError, RuntimeError) as error:
            if counted is model:
                raise
            raise MeterUnavailable(
                f"{type(model).__name__} cannot be counted without its weights: {first_line(error)}"
            ) from error
    return float(total)


def _count(model: nn.Module, sample: torch.Tensor, method: FlopMethod) -> int:
    if method == "ptflops":
        return count_with_ptflops(model, sample)
    return count_flops(lambda: model(input_ids=sample))


def get_memory(device: torch.device) -> GpuMemory:
    """torch's allocator on `device`, in bytes: now, and the most since its peaks were last reset.

    All None on the CPU, where torch keeps no such figures. Not counted: the CUDA context, and other libraries' memory.
    """
    if device.type != "cuda":
        return GpuMemory(
            gpu_current_memory_allocated_bytes=None,
            gpu_max_memory_allocated_bytes=None,
            gpu_current_memory_reserved_bytes=None,
            gpu_max_memory_reserved_bytes=None,
            reason=f"{device} is no GPU: torch keeps no such figures there",
        )
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
    `device` alone, and none on the CPU or where the driver does not tell.
    """
    percent, reason = _gpu_utilisation(device)
    return ComputeUtilisation(
        gpu_utilization_percent=[] if percent is None else [float(percent)],
        cpu_usage_percent=psutil.cpu_percent(interval=None),
        cpu_memory_usage_bytes=psutil.Process().memory_info().rss,
        reason=reason,
    )


def _gpu_utilisation(device: torch.device) -> tuple[int | None, str | None]:
    uuid = gpu_uuid(device)
    if uuid is None:
        return None, f"{device} is no GPU"
    try:
        reading = NvmlGpu(uuid).read()
    except MeterUnavailable as error:
        return None, str(error)
    return reading.utilisation_percent, None if reading.utilisation_percent is not None else reading.reason


def combine_comp_metrics(
    model: nn.Module,
    device: torch.device,
    tokenised_input_ids: torch.Tensor | TokenisedPrompts,
    accelerator: ProcessPlace,
    experiment_config: Any,
) -> ComputeMetrics:
    """FLOPs of one forward pass over all prompts given, whichever process runs them, and this process's figures.

    Memory and utilisation are read before counting, which itself runs the model. See `count_prompt_flops` for what the
    FLOPs hold; method and time limit are `flops_method` and `flops_timeout_s` of the configuration.

    Raises:
        ConfigurationError: a value of the configuration is not allowed, or as `count_prompt_flops`.
    """
    config = judged(experiment_config)
    memory, utilisation = get_memory(device), get_gpu_cpu_utilisation(device)
    counted = count_prompt_flops(model, tokenised_input_ids, config.flops_timeout_s, config.flops_method)
    return ComputeMetrics(
        flops=counted.flops,
        memory=memory,
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
