"""Records of operations, memory and load, and the means and peaks of a window's load."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from experiment_core_utils.primitives.statistics import highest_of
from experiment_core_utils.records.json_record import Amount, Count, Number, Peak, Record


class GenerationFlops(TypedDict):
    """Operations of what a run generated, without padding and positions after an end; None where there is no figure."""

    prefill_flops: int | None  #: all prompts, the head on the last position; None if not countable
    decode_flops: int | None  #: n - 1 steps for an answer of n tokens; None if not countable
    generation_flops: int | None  #: prefill and decode; None if not countable
    generation_flops_per_output_token: float | None  #: the same / output tokens; None if not countable
    generation_flops_source: str  #: `formula`, or `counted` on a model without weights, in at most 120 s
    generation_flops_reason: str | None  #: why these are null; None if they are not


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


class Memory(Record):
    """Memory of a setting in bytes."""

    #: most memory that torch had allocated on the GPU, of several GPUs of the process the sum, in passes that keep
    #: nothing of other settings; None if on the CPU
    peak_memory_bytes: Amount | None
    #: most that torch's allocator had reserved there; None if on the CPU
    peak_reserved_bytes: Amount | None = None
    #: resident memory of the whole process when the window closed, libraries and earlier settings included: it does not
    #: follow the setting, and is not compared; None of a model behind a server
    process_rss_bytes: Amount | None = None
    reason: str | None = None  #: why a figure is null; None if no figure is
    #: passes of which the peaks are the highest; None if they are of the setting's runs, as on the CPU, of a single
    #: setting and where its passes failed
    num_passes: Count | None = None
    #: parameters and buffers as stored, those of blocks that did not run among them; None if the model does not report
    #: it
    weights_bytes: Amount | None = None
    #: keys and values of the longest sample at its end, by formula; None if samples were answered in batches
    kv_cache_bytes: Amount | None = None
    #: `peak_memory_bytes` without these two: a lower bound of other memory; None if one of the three is null
    activation_bytes: Amount | None = None
    parts_reason: str | None = None  #: why one of these three is null; None if none is
    #: the next three together: what one request at this setting needs, by formula, the same on every device
    #: ([compute.md](compute.md#memory)); None if one is null, or no sample was run
    counted_memory_bytes: Amount | None = None
    counted_weights_bytes: Amount | None = None  #: as `weights_bytes`; None if unknown, or no sample was run
    #: keys and values of the longest sample at its end, x `batch_size`; None as above
    counted_kv_cache_bytes: Amount | None = None
    #: the largest of its prefill, x `batch_size` if modules run it; None without a formula
    counted_activation_bytes: Amount | None = None


class ProcessLoad(Record):
    """Load along one window in which a process measured samples."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run
    window_s: Number | None = None  #: length of the window: warm-up, samples, and waiting for their requests
    #: list, for each GPU that the process uses: mean over the window of the driver's figure, `[]` without a GPU; one is
    #: null where the GPU does not report it
    gpu_utilization_percent: list[Number | None] | None = None
    gpu_utilization_percent_max: list[Number | None] | None = None  #: the highest reading of each; None if as above
    #: mean of all CPUs of the host, of all programs; None if the host counted no time in the window
    cpu_usage_percent: Number | None = None
    cpu_usage_percent_max: Number | None = None  #: the highest reading; None if as above
    cpu_memory_usage_bytes: Count | None = None  #: mean resident memory of the process
    cpu_memory_usage_bytes_max: Count | None = None  #: the highest reading
    num_samples: Count | None = None  #: readings
    sample_interval_s: Number | None = None  #: time between two readings
    reason: str | None = None  #: why a figure of a GPU is missing; None if none is


class MemoryTimeline(Record):
    """Memory along one window in which a process measured samples."""

    rank: Count | None = None  #: the process
    experiment_id: str | None = None  #: the run
    interval_s: Number | None = None  #: time between two readings
    #: list of objects of `seconds` (since the window opened), `allocated_bytes`, `reserved_bytes` (torch's on the GPUs
    #: that the process uses; null without one) and `process_rss_bytes`
    samples: list[dict[str, Number | None]] | None = None


class HardwareUtilisation(Record):
    """Model FLOPs utilisation (MFU) and model bandwidth utilisation (MBU), fractions of the peaks of the data sheet."""

    #: `vision_flops` / `T_vision_total` as a fraction of `peak_flops_per_s`; None without a known peak, or where no
    #: sample has a picture
    mfu_vision: Amount | None = None
    mfu_prefill: Amount | None = None  #: the same of the prefill; None without a known peak
    #: the same of all decode steps; None without a known peak, or where no sample has 2 output tokens
    mfu_decode: Amount | None = None
    #: weights and cache that the decode steps must read / `T_LLM_decode` as a fraction of `peak_bytes_per_s`; None as
    #: above
    mbu_decode: Amount | None = None
    #: of the GPU, or of all that compute at the same time because processes share the weights, by its data sheet; None
    #: on the CPU, on a GPU that is not in the table, or for a number format that it has no peak for
    peak_flops_per_s: Peak | None
    peak_bytes_per_s: Peak | None  #: of its memory; None on the CPU, or on a GPU that is not in the table
    #: number format of the peak: that of the weights, `tf32` where torch may use it for float32; None where that of the
    #: model's products is not known
    peak_dtype: str | None = None
    utilisation_reason: str | None  #: why the figures are null; None where none is


class ComputePart(Record):
    """Memory, load and utilisation of a setting."""

    memory: Memory | None  #: memory of the setting; None if no process has a reading
    #: list: load along each window in which a process measured samples of the setting, [below](#compute-utilisation),
    #: may be `[]`
    compute_utilisation: list[ProcessLoad] | None = None
    #: list: memory along the same windows, [below](#memory-timeline); None if `--memory_timeline` was not given
    memory_timeline: list[MemoryTimeline] | None = None
    hardware_utilisation: HardwareUtilisation  #: MFU and MBU, [below](#hardware-utilisation)


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
    return MemoryTimeline.of(interval_s=trace.interval_s, samples=samples)


def _mean(values: Sequence[float | None], spans: Sequence[float]) -> float | None:
    """Mean weighted by time; None where nothing was reported."""
    known = [(value, span) for value, span in zip(values, spans, strict=True) if value is not None]
    whole = sum(span for _, span in known)
    if not known:
        return None
    return sum(value * span for value, span in known) / whole if whole else known[-1][0]


def fraction_of_peak(amount: float | None, seconds: float | None, peak_per_s: float | None) -> float | None:
    """`amount` a second as a fraction of a peak; None where one of them is not known, or there was no time."""
    if amount is None or not seconds or peak_per_s is None:
        return None
    return amount / seconds / peak_per_s


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
