"""Memory, load and utilisation of a setting over all of its samples."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.host_facts import Peaks, peaks_on
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.models.interface import Inspectable, Runnable, Served, Shared
from experiment_core_utils.primitives.errors import MeterUnavailable
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.units import MemoryReading
from experiment_core_utils.records.compute import (
    ComputePart,
    HardwareUtilisation,
    Memory,
    MemoryParts,
    MemoryTimeline,
    ProcessLoad,
    fraction_of_peak,
    memory_parts,
    memory_timeline,
    utilisation_of,
)
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.settings import MeasuredSample, MeasuredSetting, SettingLoad
from experiment_core_utils.records.stages import MODULES


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


def _decode_steps(sample: MeasuredSample) -> int:
    """Steps of the first run, in which all requests of a batch take part."""
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
                fraction_of_peak(of_batch(sample, flops_of(flops, own_steps(sample))), seconds(sample, stage), peak)
                for sample, flops in measured
            ]
        )

    peak = peaks.flops_per_s

    def of_batch(sample: MeasuredSample, flops: float | None) -> float | None:
        """As if all requests of a batch were as this one, which each is in turn."""
        return None if flops is None else flops * sample.batch_size

    def own_steps(sample: MeasuredSample) -> int:
        return _decode_steps(sample) if sample.batch_size == 1 else max(sample.output_tokens - 1, 0)

    def decode_flops(flops: StageFlops, steps: int) -> float | None:
        return None if flops.decode_flops_per_token is None else flops.decode_flops_per_token * steps

    def step_bytes(sample: MeasuredSample) -> float | None:
        if model is None:
            return None
        return model.step_bytes(sample.shape.prompt_tokens, _decode_steps(sample), sample.batch_size)

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


def setting_memory(
    reading: MemoryReading | None, samples: Sequence[MeasuredSample], model: ModelBytes | None, batch_size: int = 1
) -> MemoryParts | None:
    """Parts of a setting's memory; None without a reading. The cache is that of a whole batch.

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
    positions = max((each.most_positions for each in samples), default=0)
    cache = batch_size * model.cache_bytes(positions)
    return memory_parts(
        reading.peak_memory_bytes, model.weights_bytes, cache, reading.process_rss_bytes, reading.reason
    )


def counted_memory(
    samples: Sequence[MeasuredSample], model: ModelBytes | None, batch_size: int = 1, rows_of_prefill: int = 1
) -> dict[str, int | None]:
    """`counted_...` of `memory`: what the largest request of a setting needs by formula, or a batch of such requests.

    It follows from the setting, not from the machine, the order of settings or batches. Not counted is what
    `activation_elements` leaves out.

    Args:
        rows_of_prefill: requests whose prompts are computed together: engines take them one by one.
    """
    weights = cache = activations = None
    if model is not None and samples:
        weights = model.weights_bytes
        cache = batch_size * model.cache_bytes(max(each.most_positions for each in samples))
        activations = model.activation_bytes(rows_of_prefill * max(each.shape.prompt_tokens for each in samples))
    parts = {"weights": weights, "kv_cache": cache, "activation": activations}
    known = [each for each in parts.values() if each is not None]
    return {
        "counted_memory_bytes": sum(known) if len(known) == len(parts) else None,
        **{f"counted_{name}_bytes": value for name, value in parts.items()},
    }


def _countable(model: ModelBytes | None, samples: Sequence[MeasuredSample]) -> ModelBytes | None:
    """The bytes of a model; None where the cache of the largest request cannot be counted, with any other unknown."""
    try:
        if model is not None and samples:
            model.cache_bytes(max(each.most_positions for each in samples))
    except MeterUnavailable:
        return None
    return model


_OF_A_SERVER = "another process has the model: its memory is not seen"


def setting_compute(setting: Setting, merged: MeasuredSetting, model: Runnable, dtype: str | None) -> ComputePart:
    """Memory with its parts, load and utilisation of a setting of the knobs over all its samples.

    Args:
        dtype: of the model's products.
    """
    counted = _countable(model.count_bytes(setting) if isinstance(model, Inspectable) else None, merged.samples)
    size = batch_size_of(setting)
    stages = (None if merged.proof is None else merged.proof.execution_stages) or {}
    parts = setting_memory(merged.memory, merged.samples, counted, size)
    rows = size if stages.get("prefill", MODULES) == MODULES else 1
    by_formula = counted_memory(merged.samples, counted, size, rows)
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
