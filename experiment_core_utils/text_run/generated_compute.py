"""Operations, memory and utilisation of what a text run generated."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from experiment_core_utils.config.text import validated
from experiment_core_utils.meters.host_facts import Peaks, peaks_on
from experiment_core_utils.models.common.block_modules import block_stack
from experiment_core_utils.models.common.describe import computing_dtype, quantisation_in_force, stored_bytes
from experiment_core_utils.models.costs.active_shapes import COUNTING_LIMIT_S, architecture_in_force, generation_flops
from experiment_core_utils.models.costs.architecture import Architecture, UnknownArchitecture
from experiment_core_utils.models.costs.decoder import BlockShape, ExpertsShape
from experiment_core_utils.models.costs.memory import StepWeights, cache_elements, read_elements, step_weights
from experiment_core_utils.primitives.device import resident_bytes, used_gpus
from experiment_core_utils.records.compute import (
    GenerationFlops,
    HardwareUtilisation,
    MemoryParts,
    fraction_of_peak,
    memory_parts,
)
from experiment_core_utils.records.text import BatchRecord, InferenceResults


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


def largest_batch_cache(batches: Sequence[BatchRecord], blocks: Sequence[BlockShape], element_bytes: int) -> int:
    """Bytes of the largest cache among the batches of one process, at each batch's end: padding is held too, the last
    token is not."""
    rows = [len(batch["prompt_indices"]) for batch in batches]
    positions = [batch["padded_input_tokens"] + batch["computed_output_tokens"] for batch in batches]
    elements = (n * cache_elements(blocks, each // n - 1) for n, each in zip(rows, positions, strict=True))
    return max(elements, default=0) * element_bytes


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
    stack = block_stack(model)
    assert stack is not None  # Of a known architecture.
    shapes = [block.mlp for block in architecture.decoder.blocks]
    experts = [(mlp.num_experts, mlp.top_k) if isinstance(mlp, ExpertsShape) else None for mlp in shapes]
    return step_weights(list(stack.blocks), model.get_output_embeddings(), experts)
