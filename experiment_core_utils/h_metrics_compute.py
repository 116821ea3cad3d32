"""In: a model and inputs, or a device; out: floating-point operations, memory and utilisation.

Operations follow from formulas where the architecture is known, because they must move with every knob at no cost; any
other model is counted by running it once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.config.text import validated
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.host_facts import Peaks, peaks_on
from experiment_core_utils.meters.nvml import NvmlGpu
from experiment_core_utils.models.common.describe import computing_dtype, quantisation_in_force, stored_bytes
from experiment_core_utils.models.costs.active_shapes import COUNTING_LIMIT_S, architecture_in_force, generation_flops
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture
from experiment_core_utils.models.costs.decoder import BlockShape, ExpertsShape
from experiment_core_utils.models.costs.memory import (
    ModelBytes,
    StepWeights,
    cache_elements,
    read_elements,
    step_weights,
)
from experiment_core_utils.models.costs.prompt_flops import FlopMethod, count_prompt_flops
from experiment_core_utils.models.interface import Inspectable, Runnable, Served, Shared
from experiment_core_utils.primitives.device import gpu_uuid, resident_bytes, used_gpus
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.units import MemoryReading
from experiment_core_utils.records.compute import (
    ComputePart,
    ComputeUtilisation,
    GenerationFlops,
    HardwareUtilisation,
    LoadSample,
    LoadTrace,
    Memory,
    MemoryParts,
    MemoryTimeline,
    ProcessLoad,
    memory_timeline,
    utilisation_of,
)
from experiment_core_utils.records.requests import StageFlops, TokenisedPrompts
from experiment_core_utils.records.settings import MeasuredSample, MeasuredSetting, SettingLoad
from experiment_core_utils.records.text import (
    BatchRecord,
    ComputeMetrics,
    GpuMemory,
    InferenceResults,
    ProcessPlace,
    all_absent,
)


def loads_of(loads: Sequence[SettingLoad]) -> list[ProcessLoad]:
    """`compute_utilisation`: one entry for each window."""
    return [
        ProcessLoad.of(
            rank=each.rank,
            experiment_id=each.experiment_id,
            window_s=each.trace.samples[-1].at_s,
            **utilisation_of(each.trace),
        )
        for each in loads
    ]


def timelines_of(loads: Sequence[SettingLoad]) -> list[MemoryTimeline] | None:
    """`memory_timeline`: one entry for each window; None where none was requested."""
    wanted = (each for each in loads if each.has_timeline)
    return [
        memory_timeline(each.trace).with_keys(rank=each.rank, experiment_id=each.experiment_id) for each in wanted
    ] or None


def fraction_of_peak(amount: float | None, seconds: float | None, peak_per_s: float | None) -> float | None:
    """`amount` a second as a fraction of a peak; None where one of them is not known, or there was no time."""
    if amount is None or not seconds or peak_per_s is None:
        return None
    return amount / seconds / peak_per_s


def text_utilisation(
    results: InferenceResults,
    flops: GenerationFlops,
    read_bytes: float | None,
    peaks: Peaks,
    num_gpus: int,
    reasons: Sequence[str] = (),
) -> HardwareUtilisation:
    """Utilisation in a text run, over the time of all its batches.

    The first token's time counts as prefill, the times between tokens as decode.

    Args:
        results: of one process, or pooled over all: each process computes on GPUs of its own.
        read_bytes: see `decode_read_bytes`.
        num_gpus: of each process.
        reasons: why something given is None.
    """
    firsts = [batch["ttft_s"] for batch in results["batches"]]
    known = [first for first in firsts if first is not None]
    prefill_s = sum(known) * num_gpus if len(known) == len(firsts) else None
    decode_s = sum(sum(batch["inter_token_s"]) for batch in results["batches"]) * num_gpus
    silent = [] if prefill_s is not None else ["the model's own generate() does not report single tokens"]
    missing = [each for each in (peaks.reason, flops["generation_flops_reason"], *silent, *reasons) if each is not None]
    return HardwareUtilisation.of(
        mfu_vision=None,
        mfu_prefill=fraction_of_peak(flops["prefill_flops"], prefill_s, peaks.flops_per_s),
        mfu_decode=fraction_of_peak(flops["decode_flops"], decode_s, peaks.flops_per_s),
        mbu_decode=fraction_of_peak(read_bytes, decode_s, peaks.bytes_per_s),
        peak_flops_per_s=peaks.flops_per_s,
        peak_bytes_per_s=peaks.bytes_per_s,
        peak_dtype=peaks.dtype,
        utilisation_reason="; ".join(dict.fromkeys(missing)) or None,
    )


def decode_read_bytes(
    results: InferenceResults, weights: StepWeights, blocks: Sequence[BlockShape], element_bytes: int
) -> float:
    """Bytes that the decode steps of a text run must read: for each step the weights that its rows need, for each
    answer's own steps the keys and values of its true tokens.

    Args:
        element_bytes: of a number in the cache.
    """
    of_weights = sum(_steps(batch) * weights.read(len(batch["prompt_indices"])) for batch in results["batches"])
    of_cache = sum(
        read_elements(blocks, range(query["input_tokens"] + 1, query["input_tokens"] + query["output_tokens"]))
        for query in results["queries"]
    )
    return of_weights + of_cache * element_bytes


def _steps(batch: BatchRecord) -> int:
    return batch["computed_output_tokens"] // len(batch["prompt_indices"]) - 1


def _decode_steps(sample: MeasuredSample) -> int:
    """Steps of the first run, which the operations are of."""
    return len(sample.runs[0].inter_token_s)


def setting_utilisation(
    samples: Sequence[MeasuredSample], model: ModelBytes | None, peaks: Peaks
) -> HardwareUtilisation:
    """Utilisation in a setting of the knobs: means over the samples that were measured and have the stage."""
    measured = [(sample, sample.flops) for sample in samples if sample.runs and sample.flops is not None]
    silent = "the model's number of bytes is unknown" if model is None else None
    if not measured:
        silent = "no sample with known operations was measured"

    def seconds(sample: MeasuredSample, stage: str) -> float | None:
        return mean_of([getattr(run, stage) for run in sample.runs])

    def mean_mfu(stage: str, flops_of: Callable[[StageFlops, int], float | None]) -> float | None:
        return mean_of(
            [
                fraction_of_peak(flops_of(flops, _decode_steps(sample)), seconds(sample, stage), peaks.flops_per_s)
                for sample, flops in measured
            ]
        )

    def decode_flops(flops: StageFlops, steps: int) -> float | None:
        return None if flops.decode_flops_per_token is None else flops.decode_flops_per_token * steps

    def step_bytes(sample: MeasuredSample) -> float | None:
        return None if model is None else model.step_bytes(sample.shape.prompt_tokens, _decode_steps(sample))

    return HardwareUtilisation.of(
        mfu_vision=mean_mfu("vision_s", lambda flops, _: flops.vision_flops),
        mfu_prefill=mean_mfu("prefill_s", lambda flops, _: flops.prefill_flops),
        mfu_decode=mean_mfu("decode_s", decode_flops),
        mbu_decode=mean_of(
            [
                fraction_of_peak(step_bytes(sample), seconds(sample, "decode_s"), peaks.bytes_per_s)
                for sample, _ in measured
            ]
        ),
        peak_flops_per_s=peaks.flops_per_s,
        peak_bytes_per_s=peaks.bytes_per_s,
        peak_dtype=peaks.dtype,
        utilisation_reason=peaks.reason or silent,
    )


def memory_parts(
    peak_bytes: int | None,
    weights_bytes: int | None,
    cache_bytes: int | None,
    rss_bytes: int,
    reason: str | None = None,
) -> MemoryParts:
    """What is left of the peak beside weights and the largest cache counts as activations.

    Args:
        reason: why one of the three is None.
    """
    activations = None
    if peak_bytes is not None and weights_bytes is not None and cache_bytes is not None:
        activations = peak_bytes - weights_bytes - cache_bytes
        if activations < 0:
            activations, reason = None, f"weights and cache are more than the peak of {peak_bytes} bytes on this GPU"
    return MemoryParts(
        weights_bytes=weights_bytes,
        kv_cache_bytes=cache_bytes,
        activation_bytes=activations,
        process_rss_bytes=rss_bytes,
        parts_reason=reason,
    )


def largest_batch_cache(batches: Sequence[BatchRecord], blocks: Sequence[BlockShape], element_bytes: int) -> int:
    """Bytes of the largest cache among the batches of one process, at each batch's end: padding is held too, the last
    token is not."""
    rows = [len(batch["prompt_indices"]) for batch in batches]
    positions = [batch["padded_input_tokens"] + batch["computed_output_tokens"] for batch in batches]
    elements = (n * cache_elements(blocks, each // n - 1) for n, each in zip(rows, positions, strict=True))
    return max(elements, default=0) * element_bytes


def setting_memory(
    reading: MemoryReading | None, samples: Sequence[MeasuredSample], model: ModelBytes | None
) -> MemoryParts | None:
    """Parts of a setting's memory; None without a reading.

    Where samples were answered in batches, the peak may be theirs, and no part but the weights is known.
    """
    if reading is None:
        return None
    if model is None:
        reason = "the model's number of bytes is unknown"
        return memory_parts(reading.peak_memory_bytes, None, None, reading.process_rss_bytes, reason)
    if any(sample.answer is not None for sample in samples):
        reason = "samples were answered in batches, whose caches are in the peak"
        return memory_parts(reading.peak_memory_bytes, model.weights_bytes, None, reading.process_rss_bytes, reason)
    positions = max((each.shape.prompt_tokens + each.output_tokens - 1 for each in samples), default=0)
    cache = model.cache_bytes(positions)
    return memory_parts(
        reading.peak_memory_bytes, model.weights_bytes, cache, reading.process_rss_bytes, reading.reason
    )


def counted_memory(samples: Sequence[MeasuredSample], model: ModelBytes | None) -> dict[str, int | None]:
    """`counted_...` of `memory`: what the largest request of a setting needs by formula, run alone.

    It follows from the setting, not from the machine, the order of settings or batches. Not counted is what
    `activation_elements` leaves out.
    """
    weights = cache = activations = None
    if model is not None and samples:
        weights = model.weights_bytes
        cache = model.cache_bytes(max(each.shape.prompt_tokens + each.output_tokens - 1 for each in samples))
        activations = model.activation_bytes(max(each.shape.prompt_tokens for each in samples))
    parts = {"weights": weights, "kv_cache": cache, "activation": activations}
    known = [each for each in parts.values() if each is not None]
    return {
        "counted_memory_bytes": sum(known) if len(known) == len(parts) else None,
        **{f"counted_{name}_bytes": value for name, value in parts.items()},
    }


_AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}


def generation_metrics(
    model: torch.nn.Module, device: torch.device, results: InferenceResults, experiment_config: Any
) -> tuple[GenerationFlops, HardwareUtilisation]:
    """The operations of what was generated, and the peaks' fractions that they reached.

    Args:
        device: that the model takes prompts on.
        results: of one process, or pooled over all.

    Raises:
        ConfigurationError: a value of the configuration is not allowed.
    """
    config = validated(experiment_config)
    # The other processes wait for this one meanwhile.
    flops = generation_flops(model, results, min(COUNTING_LIMIT_S, config.worker_timeout / 2))
    known, reason = _known_cache(model, config.mixed_precision)
    read_bytes = None
    if known is not None:
        architecture, element_bytes = known
        weights = _step_weights(model, architecture)
        read_bytes = decode_read_bytes(results, weights, architecture.decoder.blocks, element_bytes)
    peaks = peaks_on(device, products_dtype(model, config.mixed_precision))
    num_gpus = max(len(used_gpus()), 1)
    reasons = [] if reason is None else [reason]
    return flops, text_utilisation(results, flops, read_bytes, peaks, num_gpus, reasons)


def text_memory(
    model: torch.nn.Module,
    device: torch.device,
    mixed_precision: str,
    results: InferenceResults | None,
    peak_bytes: int | None,
) -> MemoryParts:
    """What the peak of this process's window is made of.

    Args:
        results: what this process generated.
        peak_bytes: of `device`; None on the CPU.
    """
    known, reason = _known_cache(model, mixed_precision)
    cache_bytes = None
    if results is None:
        reason = "no results were given, so the size of the cache is unknown"
    elif known is not None:
        architecture, element_bytes = known
        cache_bytes = largest_batch_cache(results["batches"], architecture.decoder.blocks, element_bytes)
    if peak_bytes is None:
        reason = reason or f"{device} is not a GPU: torch records no peak memory there"
    elif len(used_gpus()) > 1:
        peak_bytes, reason = None, "the model is spread over several GPUs, whose peaks are not of one moment"
    return memory_parts(peak_bytes, stored_bytes(model), cache_bytes, resident_bytes(), reason)


def products_dtype(model: torch.nn.Module, mixed_precision: str) -> str | None:
    """Number format of most products; None for a model without floating-point weights."""
    if mixed_precision != "no":
        return _AUTOCAST[mixed_precision]
    quantised = quantisation_in_force(model)
    return "float8" if quantised is not None and quantised["method"] == "fp8" else computing_dtype(model)


def _known_cache(model: torch.nn.Module, mixed_precision: str) -> tuple[tuple[Architecture, int] | None, str | None]:
    """The architecture with the bytes of a number in its cache, or why they are not known."""
    architecture, dtype = architecture_in_force(model), computing_dtype(model)
    if isinstance(architecture, UnknownArchitecture):
        return None, architecture.reason
    if mixed_precision != "no":
        return None, f"under mixed_precision {mixed_precision} the number format of the cache is not known"
    if dtype is None:
        return None, "the number format of its cache is unknown: the model has no floating-point weights"
    return (architecture, getattr(torch, dtype).itemsize), None


def _step_weights(model: torch.nn.Module, architecture: Architecture) -> StepWeights:
    assert isinstance(model, PreTrainedModel)
    shapes = [block.mlp for block in architecture.decoder.blocks]
    experts = [(mlp.num_experts, mlp.top_k) if isinstance(mlp, ExpertsShape) else None for mlp in shapes]
    return step_weights(list(model.get_decoder().layers), model.get_output_embeddings(), experts)


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
    percent, reason = _gpu_utilisation(device)
    gpus = () if percent is None else (percent,)
    now = LoadSample(0.0, 0.0, psutil.cpu_percent(interval=None), gpus, resident_bytes(), None, None)
    return {**utilisation_of(LoadTrace((now,), 0.0, reason)), "num_samples": 0, "sample_interval_s": None}


def _gpu_utilisation(device: torch.device) -> tuple[float | None, str | None]:
    uuid = gpu_uuid(device)
    if uuid is None:
        return None, f"{device} is not a GPU"
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


def with_generation(
    compute: ComputeMetrics,
    memories: Sequence[Mapping[str, Any]],
    model: torch.nn.Module,
    device: torch.device,
    pooled: InferenceResults,
    experiment_config: Any,
) -> dict[str, Any]:
    """One process's figures with those of the whole run: FLOPs of what was generated, utilisation, memory by process.

    Raises:
        ConfigurationError: a value of the configuration is not allowed.
    """
    flops, utilisation = generation_metrics(model, device, pooled, experiment_config)
    return {**compute, **flops, "hardware_utilisation": utilisation.content(), "memory_by_process": list(memories)}


_OF_A_SERVER = "another process has the model: its memory is not seen"


def setting_compute(setting: Setting, merged: MeasuredSetting, model: Runnable, dtype: str | None) -> ComputePart:
    """Memory with its parts, load and utilisation of a setting of the knobs over all its samples.

    Args:
        dtype: of the model's products.
    """
    counted = model.count_bytes(setting) if isinstance(model, Inspectable) else None
    parts = setting_memory(merged.memory, merged.samples, counted)
    by_formula = counted_memory(merged.samples, counted)
    memory = None if merged.memory is None or parts is None else {**asdict(merged.memory), **parts, **by_formula}
    num_sharing = model.num_sharing if isinstance(model, Shared) else None
    peaks = peaks_on(model.device, dtype).times(num_sharing or 1)
    # Of a model that processes share this one has its part.
    if isinstance(model, Served) and num_sharing is None:
        peaks = Peaks(None, dtype, None, None, "another process has the model: its device is not seen")
        if memory is not None:
            memory = dict.fromkeys(memory) | {"reason": _OF_A_SERVER, "parts_reason": _OF_A_SERVER}
    return ComputePart.of(
        memory=None if memory is None else Memory.of(**memory),
        compute_utilisation=loads_of(merged.loads),
        memory_timeline=timelines_of(merged.loads),
        hardware_utilisation=setting_utilisation(merged.samples, counted, peaks),
    )
