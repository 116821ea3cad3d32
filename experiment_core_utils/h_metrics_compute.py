"""In: a model and inputs, or a device; out: floating-point operations, memory and utilisation.

Operations follow from formulas where the architecture is known, because they must move with every knob at no cost; any
other model is counted by running it once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import psutil
import torch
from torch import nn

from experiment_core_utils.hardware_utilisation import setting_utilisation
from experiment_core_utils.load_entries import loads_of, timelines_of
from experiment_core_utils.memory_breakdown import setting_memory
from experiment_core_utils.meters.flop_counter import (
    count_flops,
    count_with_ptflops,
    has_packed_weights,
    meta_twin,
    told_of_no_padding,
)
from experiment_core_utils.meters.gpu_peaks import peaks_on
from experiment_core_utils.meters.load_trace import utilisation_of
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.models.architecture_flops import Architecture, UnknownArchitecture, architecture_of
from experiment_core_utils.models.counted_flops import FOREIGN_ERRORS
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.models.shapes_in_force import architecture_in_force
from experiment_core_utils.primitives.compute_records import LoadTrace
from experiment_core_utils.primitives.device import gpu_uuid, out_of_memory_named, resident_bytes
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    OutOfMemory,
    SampleTimedOut,
    first_line,
)
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import (
    ComputeMetrics,
    ComputeUtilisation,
    FlopCount,
    GpuMemory,
    InferenceResults,
    MeasuredSetting,
    ProcessPlace,
    TokenisedPrompts,
)
from experiment_core_utils.primitives.text_config import judged
from experiment_core_utils.setting_result import ComputePart, Memory, Utilisation
from experiment_core_utils.text_compute import text_memory

FlopMethod = Literal["formula", "counter", "ptflops"]
_METHODS = ("formula", "counter", "ptflops")


def get_flops(
    model: nn.Module,
    input_ids: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "formula",
) -> float | None:
    """`count_prompt_flops` as a number alone; None where it could not be counted."""
    return count_prompt_flops(model, input_ids, timeout_per_sample, method).flops


def count_prompt_flops(
    model: nn.Module,
    tokenised: torch.Tensor | TokenisedPrompts,
    timeout_per_sample: float | None = 10,
    method: FlopMethod = "formula",
) -> FlopCount:
    """Operations of one forward pass of each prompt by itself, summed: no padding, logits at every position.

    By formula they take no time and hold what is in force in the model: its active blocks, its experts per token.
    Otherwise one prompt of each length is run, and counts as often as the length occurs. Not counted: tokens that are
    generated afterwards, elementwise work, norms, look-ups. Attention counts as the full rectangle. Packed weights have
    the FLOPs of full precision; the counters count such a model on a twin of its architecture without weights. A model
    that cannot be run has None with the reason.

    Args:
        model: anything with `forward(input_ids=[1, T])`.
        tokenised: ids [N, T] without padding, or ids and mask, both [N, T]; masked positions are left out.
        timeout_per_sample: seconds for one length, where prompts are run, more than 0; None sets no limit. It ends a
            run between two operators: one that hangs runs on.
        method: `formula` for architectures that formulas are known for (`docs/compute.md`), and `counter` for others;
            `counter` is torch's with the formulas that it lacks; `ptflops` leaves out fused attention and experts.

    Raises:
        ConfigurationError: another method, a time limit of 0 or less, ids that are not [N, T], a prompt without a
            token, or a time limit outside the main thread where prompts are run.
    """
    if method not in _METHODS:
        raise ConfigurationError(f"FLOPs cannot be counted by {method!r}; choose one of {', '.join(_METHODS)}")
    if timeout_per_sample is not None and not timeout_per_sample > 0:
        raise ConfigurationError(
            f"a prompt cannot be counted in {timeout_per_sample} s; give more than 0, or None for no limit"
        )
    ids, mask = _ids_and_mask(tokenised)
    lengths = [int(length) for length in mask.sum(dim=1)]
    if method == "formula":
        architecture = architecture_in_force(model)
        if not isinstance(architecture, UnknownArchitecture):
            total = float(sum(times * architecture.forward_flops(each) for each, times in Counter(lengths).items()))
            return _flop_count(total, method, "config", lengths, None)
        method = "counter"
    flops, reason = None, None
    if lengths:
        samples = {length: ids[row][mask[row]].unsqueeze(0) for row, length in enumerate(lengths)}
        try:
            flops = _count_lengths(model, samples, Counter(lengths), timeout_per_sample, method)
        except (MeterUnavailable, OutOfMemory, SampleTimedOut) as error:
            reason = str(error)
    return _flop_count(flops, method, "meta_twin" if has_packed_weights(model) else "model", lengths, reason)


def _flop_count(
    flops: float | None, method: FlopMethod, counted_on: str, lengths: Sequence[int], reason: str | None
) -> FlopCount:
    if not lengths:
        flops, reason = None, "there is no prompt"
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
    device, run = _to_run(model)
    total = 0
    for length, sample in samples.items():
        try:
            with out_of_memory_named(), time_limit(timeout_s, "timeout_per_sample=None"):
                total += times[length] * _count(run, sample.to(device or sample.device), method)
        except SampleTimedOut as error:
            raise SampleTimedOut(f"a prompt of {length} tokens was {error}") from error
        except FOREIGN_ERRORS as error:
            raise MeterUnavailable(
                f"{type(model).__name__} cannot be run to be counted: {type(error).__name__}: {first_line(error)}"
            ) from error
    return float(total)


def _to_run(model: nn.Module) -> tuple[torch.device | None, Callable[..., object]]:
    """What is run, and where its ids must be, None anywhere; of packed weights the twin without weights.

    Raises:
        MeterUnavailable: there is no such twin, or it would not be what runs.
    """
    if not has_packed_weights(model):
        return next((parameter.device for parameter in model.parameters()), None), model
    twin = meta_twin(model)
    by_config, in_force = architecture_of(twin.config), architecture_in_force(model)
    if isinstance(by_config, Architecture):
        if isinstance(in_force, UnknownArchitecture):
            raise MeterUnavailable(f"weights are packed, and the config does not tell what runs: {in_force.reason}")
        if by_config.forward_flops(1) != in_force.forward_flops(1):
            raise MeterUnavailable("weights are packed, and other experts or blocks run than the config says")
    return torch.device("meta"), told_of_no_padding(twin)


def _count(model: Callable[..., object], sample: torch.Tensor, method: FlopMethod) -> int:
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
    `device` alone, and none on the CPU or where the driver does not tell. For figures of a window: `LoadSampler`.
    """
    percent, reason = _gpu_utilisation(device)
    gpus: list[float | None] = [] if percent is None else [percent]
    cpu, rss = psutil.cpu_percent(interval=None), resident_bytes()
    return ComputeUtilisation(
        gpu_utilization_percent=gpus,
        gpu_utilization_percent_max=gpus,
        cpu_usage_percent=cpu,
        cpu_usage_percent_max=cpu,
        cpu_memory_usage_bytes=rss,
        cpu_memory_usage_bytes_max=rss,
        num_samples=0,
        sample_interval_s=None,
        reason=reason,
    )


def _gpu_utilisation(device: torch.device) -> tuple[float | None, str | None]:
    uuid = gpu_uuid(device)
    if uuid is None:
        return None, f"{device} is no GPU"
    try:
        return NvmlGpu(uuid).utilisation_percent(), None
    except MeterUnavailable as error:
        return None, str(error)


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

    Memory is read before counting, which may itself run the model. See `count_prompt_flops` for what the FLOPs hold;
    method and time limit are `flops_method` and `flops_timeout_s` of the configuration. FLOPs of what was generated:
    `generation_metrics`.

    Args:
        results: what this process generated, which tells how large its cache was; None leaves the cache's bytes out.
        load: of the window in which it was generated; None reads utilisation now.

    Raises:
        ConfigurationError: a value of the configuration is not allowed, or as `count_prompt_flops`.
    """
    config = judged(experiment_config)
    memory = get_memory(device)
    parts = text_memory(model, device, config, results, memory["gpu_max_memory_allocated_bytes"])
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


def setting_compute(
    setting: KnobSetting, merged: MeasuredSetting, model: StagedModel, dtype: str | None
) -> ComputePart:
    """Memory with its parts, load and utilisation of a setting of the knobs over all its samples.

    Args:
        dtype: of the model's products.
    """
    counted = model.count_bytes(setting)
    parts = setting_memory(merged.memory, merged.samples, counted)
    utilisation = setting_utilisation(merged.samples, counted, peaks_on(model.device, dtype))
    memory = None if merged.memory is None or parts is None else {**asdict(merged.memory), **parts}
    return ComputePart.model_construct(
        memory=None if memory is None else Memory.model_construct(**memory),
        compute_utilisation=loads_of(merged.loads),
        memory_timeline=timelines_of(merged.loads),
        hardware_utilisation=Utilisation.model_construct(**utilisation),
    )
