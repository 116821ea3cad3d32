"""In: the load that was sampled in a window; out: its means and peaks, and memory over time. Pure arithmetic."""

from collections.abc import Sequence
from typing import Any

from experiment_core_utils.primitives.compute_records import LoadTrace
from experiment_core_utils.primitives.records import ComputeUtilisation


def utilisation_of(trace: LoadTrace) -> ComputeUtilisation:
    """Means over the window's time, each sample standing for the time since the one before, and the highest samples."""
    samples = trace.samples
    spans = [sample.span_s for sample in samples]
    cpu = [sample.cpu_percent for sample in samples]
    rss = [sample.rss_bytes for sample in samples]
    by_gpu = list(zip(*(sample.gpu_percent for sample in samples), strict=True))
    mean_rss = _mean(rss, spans)
    assert mean_rss is not None
    return ComputeUtilisation(
        gpu_utilization_percent=[_mean(values, spans) for values in by_gpu],
        gpu_utilization_percent_max=[_most(values) for values in by_gpu],
        cpu_usage_percent=_mean(cpu, spans),
        cpu_usage_percent_max=_most(cpu),
        cpu_memory_usage_bytes=round(mean_rss),
        cpu_memory_usage_bytes_max=max(rss),
        num_samples=len(samples),
        sample_interval_s=trace.interval_s,
        reason=trace.reason,
    )


def memory_timeline(trace: LoadTrace) -> dict[str, Any]:
    """`interval_s`, and as `samples` the seconds since the window opened and the bytes at that moment."""
    samples = [
        {
            "seconds": sample.at_s,
            "allocated_bytes": sample.allocated_bytes,
            "reserved_bytes": sample.reserved_bytes,
            "process_rss_bytes": sample.rss_bytes,
        }
        for sample in trace.samples
    ]
    return {"interval_s": trace.interval_s, "samples": samples}


def _mean(values: Sequence[float | None], spans: Sequence[float]) -> float | None:
    """Weighted by time; None where nothing was told."""
    told = [(value, span) for value, span in zip(values, spans, strict=True) if value is not None]
    whole = sum(span for _, span in told)
    if not told:
        return None
    return sum(value * span for value, span in told) / whole if whole else told[-1][0]


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
