"""Records of operations, memory and load, and the means and peaks of a window's load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from experiment_core_utils.primitives.statistics import highest_of
from experiment_core_utils.records.setting_result import MemoryTimeline


class GenerationFlops(TypedDict):
    """Operations of what a run generated, without padding and positions after an end; None where there is no figure."""

    prefill_flops: int | None  #: all prompts, the head on the last position; None if not countable
    decode_flops: int | None  #: n - 1 steps for an answer of n tokens; None if not countable
    generation_flops: int | None  #: prefill and decode; None if not countable
    generation_flops_per_output_token: float | None  #: the same / output tokens; None if not countable
    generation_flops_source: str  #: `formula`, or `counted` on a model without weights, in at most 120 s
    generation_flops_reason: str | None  #: why these are null; None if they are not


@dataclass(frozen=True)
class ModelBytes:
    """A staged model's memory at a setting."""

    weights_bytes: int  #: parameters and buffers as stored, those of blocks that do not run among them
    step_weights_bytes: float  #: that a decode step of one request reads
    cache_bytes_per_token: int  #: keys and values of one position in the blocks that run


class MemoryParts(TypedDict):
    """What a window's peak memory is made of, in bytes; None where it is not known."""

    weights_bytes: int | None  #: parameters and buffers as stored, over all GPUs; None if unknown
    kv_cache_bytes: int | None  #: of the largest batch at its end, padding included, by formula; None if unknown
    activation_bytes: int | None  #: the peak minus these two, a lower bound; None without a peak or on several GPUs
    process_rss_bytes: int  #: resident memory of the process after the window
    parts_reason: str | None  #: why a part is null; None if none is


@dataclass(frozen=True)
class LoadSample:
    """Load and memory at one moment of a window, seen by a thread beside the running code."""

    at_s: float  #: seconds since the window opened
    span_s: float  #: time since the sample before, which the CPUs' load is over
    cpu_percent: float | None  #: of all CPUs of the host; None before the first hundredth of a second that they counted
    gpu_percent: tuple[float | None, ...]  #: of each GPU; None where it did not report it
    rss_bytes: int
    #: allocated_bytes, reserved_bytes: torch's on all GPUs that the process uses; None without one
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True)
class LoadTrace:
    """The samples of a window, in order; at least one, at its end."""

    samples: tuple[LoadSample, ...]
    interval_s: float
    reason: str | None  #: why a GPU reported nothing


class ComputeUtilisation(TypedDict):
    """Load of the GPUs (one figure each) and the CPUs in percent, and this process's resident memory in bytes.

    Over a window the figures are means over its time; of a single reading mean and most are the same.
    """

    gpu_utilization_percent: list[float | None]  #: mean per GPU, as the driver reports it; null for one without a value
    gpu_utilization_percent_max: list[float | None]  #: highest reading per GPU
    cpu_usage_percent: float | None  #: mean over all CPUs of the host, all programs; None if the window is too short
    cpu_usage_percent_max: float | None  #: highest reading; None if the window is too short
    cpu_memory_usage_bytes: int  #: mean resident memory of the process
    cpu_memory_usage_bytes_max: int  #: highest reading
    num_samples: int  #: readings in the window; 0 for a single one without a window
    sample_interval_s: float | None  #: time between two readings; None without a window
    reason: str | None  #: why a GPU has no value; None if all have one


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
        gpu_utilization_percent_max=[highest_of(values) for values in by_gpu],
        cpu_usage_percent=_mean(cpu, spans),
        cpu_usage_percent_max=highest_of(cpu),
        cpu_memory_usage_bytes=round(mean_rss),
        cpu_memory_usage_bytes_max=max(rss),
        num_samples=len(samples),
        sample_interval_s=trace.interval_s,
        reason=trace.reason,
    )


def memory_timeline(trace: LoadTrace) -> MemoryTimeline:
    """Memory at each moment of a window; whose window it was is not set."""
    samples = [
        {
            "seconds": sample.at_s,
            "allocated_bytes": sample.allocated_bytes,
            "reserved_bytes": sample.reserved_bytes,
            "process_rss_bytes": sample.rss_bytes,
        }
        for sample in trace.samples
    ]
    return MemoryTimeline.model_construct(interval_s=trace.interval_s, samples=samples)


def _mean(values: Sequence[float | None], spans: Sequence[float]) -> float | None:
    """Mean weighted by time; None where nothing was reported."""
    known = [(value, span) for value, span in zip(values, spans, strict=True) if value is not None]
    whole = sum(span for _, span in known)
    if not known:
        return None
    return sum(value * span for value, span in known) / whole if whole else known[-1][0]
