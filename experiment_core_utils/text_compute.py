"""In: a text model and what was generated with it; out: operations, memory in parts, MFU and MBU of the generation."""

from typing import Any

import torch
from transformers import PreTrainedModel

from experiment_core_utils.generation_flops import COUNTING_LIMIT_S, generation_flops
from experiment_core_utils.hardware_utilisation import decode_read_bytes, text_utilisation
from experiment_core_utils.memory_breakdown import largest_batch_cache, memory_parts
from experiment_core_utils.meters.gpu_peaks import peaks_on
from experiment_core_utils.models.architecture import computing_dtype, quantisation_in_force, stored_bytes
from experiment_core_utils.models.architecture_flops import Architecture, UnknownArchitecture
from experiment_core_utils.models.decoder_flops import ExpertsShape, MlpShape
from experiment_core_utils.models.memory_parts import StepWeights, step_weights
from experiment_core_utils.models.shapes_in_force import architecture_in_force
from experiment_core_utils.primitives.compute_records import MemoryParts
from experiment_core_utils.primitives.device import resident_bytes, used_gpus
from experiment_core_utils.primitives.records import InferenceResults
from experiment_core_utils.primitives.text_config import TextConfig, judged

_AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}


def generation_metrics(
    model: torch.nn.Module, device: torch.device, results: InferenceResults, experiment_config: Any
) -> dict[str, Any]:
    """The keys of `GenerationFlops`, and `hardware_utilisation`.

    Args:
        device: that the model takes prompts on.
        results: of one process, or pooled over all.

    Raises:
        ConfigurationError: a value of the configuration is not allowed.
    """
    config = judged(experiment_config)
    # The other processes wait for this one meanwhile.
    flops = generation_flops(model, results, min(COUNTING_LIMIT_S, config.worker_timeout / 2))
    known, reason = _known_cache(model, config)
    read_bytes = None
    if known is not None:
        architecture, element_bytes = known
        weights = _step_weights(model, architecture)
        read_bytes = decode_read_bytes(results, weights, architecture.decoder.blocks, element_bytes)
    peaks = peaks_on(device, products_dtype(model, config))
    num_gpus = max(len(used_gpus()), 1)
    reasons = [] if reason is None else [reason]
    return {**flops, "hardware_utilisation": text_utilisation(results, flops, read_bytes, peaks, num_gpus, reasons)}


def text_memory(
    model: torch.nn.Module,
    device: torch.device,
    config: TextConfig,
    results: InferenceResults | None,
    peak_bytes: int | None,
) -> MemoryParts:
    """What the peak of this process's window is made of.

    Args:
        results: what this process generated.
        peak_bytes: of `device`; None on the CPU.
    """
    known, reason = _known_cache(model, config)
    cache_bytes = None
    if results is None:
        reason = "no results were given, which tell how large the cache was"
    elif known is not None:
        architecture, element_bytes = known
        cache_bytes = largest_batch_cache(results["batches"], architecture.decoder.blocks, element_bytes)
    if peak_bytes is None:
        reason = reason or f"{device} is no GPU: torch keeps no high-water mark there"
    elif len(used_gpus()) > 1:
        peak_bytes, reason = None, "the model is spread over several GPUs, whose peaks are not of one moment"
    return memory_parts(peak_bytes, stored_bytes(model), cache_bytes, resident_bytes(), reason)


def products_dtype(model: torch.nn.Module, config: TextConfig) -> str | None:
    """Number format of most products; None for a model without floating-point weights."""
    if config.mixed_precision != "no":
        return _AUTOCAST[config.mixed_precision]
    quantised = quantisation_in_force(model)
    return "float8" if quantised is not None and quantised["method"] == "fp8" else computing_dtype(model)


def _known_cache(model: torch.nn.Module, config: TextConfig) -> tuple[tuple[Architecture, int] | None, str | None]:
    """The architecture with the bytes of a number in its cache, or why they are not known."""
    architecture, dtype = architecture_in_force(model), computing_dtype(model)
    if isinstance(architecture, UnknownArchitecture):
        return None, architecture.reason
    if config.mixed_precision != "no":
        return None, f"under mixed_precision {config.mixed_precision} the number format of the cache is not known"
    if dtype is None:
        return None, "the model has no floating-point weights that tell the number format of its cache"
    return (architecture, getattr(torch, dtype).itemsize), None


def _step_weights(model: torch.nn.Module, architecture: Architecture) -> StepWeights:
    assert isinstance(model, PreTrainedModel)
    experts = [_experts(block.mlp) for block in architecture.decoder.blocks]
    return step_weights(list(model.get_decoder().layers), model.get_output_embeddings(), experts)


def _experts(mlp: MlpShape | ExpertsShape) -> tuple[int, int] | None:
    return (mlp.num_experts, mlp.top_k) if isinstance(mlp, ExpertsShape) else None
