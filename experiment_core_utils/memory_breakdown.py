"""In: a window's peak memory, the weights, and what was generated or measured; out: the peak in parts. Pure."""

from collections.abc import Sequence

from experiment_core_utils.models.decoder_flops import BlockShape
from experiment_core_utils.models.memory_parts import cache_elements
from experiment_core_utils.primitives.compute_records import MemoryParts, ModelBytes
from experiment_core_utils.primitives.records import BatchRecord, MeasuredSample, MemoryReading


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
    return max((_cache_elements(batch, blocks) * element_bytes for batch in batches), default=0)


def _cache_elements(batch: BatchRecord, blocks: Sequence[BlockShape]) -> int:
    rows = len(batch["prompt_indices"])
    positions = (batch["padded_input_tokens"] + batch["computed_output_tokens"]) // rows - 1
    return rows * cache_elements(blocks, positions)


def setting_memory(
    reading: MemoryReading | None, samples: Sequence[MeasuredSample], model: ModelBytes | None
) -> MemoryParts | None:
    """Parts of a setting's memory; None without a reading.

    Where samples were answered in batches, the peak may be theirs, and no part but the weights can be told.
    """
    if reading is None:
        return None
    if model is None:
        reason = "the model does not tell its bytes"
        return memory_parts(reading.peak_memory_bytes, None, None, reading.process_rss_bytes, reason)
    if any(sample.answer is not None for sample in samples):
        reason = "samples were answered in batches, whose caches are in the peak"
        return memory_parts(reading.peak_memory_bytes, model.weights_bytes, None, reading.process_rss_bytes, reason)
    positions = max((each.shape.prompt_tokens + each.output_tokens - 1 for each in samples), default=0)
    cache = positions * model.cache_bytes_per_token
    return memory_parts(
        reading.peak_memory_bytes, model.weights_bytes, cache, reading.process_rss_bytes, reading.reason
    )
