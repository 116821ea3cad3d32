"""In: operations and bytes of what ran, its times, and the peaks of the GPU; out: MFU and MBU. Pure.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B): operations that the model needs / time, as a
share of the peak. MBU, model bandwidth utilisation (Agarwal et al. 2023, LLM Inference Performance Engineering): bytes
of the active weights and of the cache that decode steps must read / time, as a share of the peak. Both ask what the
model needs, not what ran: padding, positions after an answer's end and recomputed work lower them.
"""

from collections.abc import Sequence

from experiment_core_utils.meters.gpu_peaks import Peaks
from experiment_core_utils.models.decoder_flops import BlockShape
from experiment_core_utils.models.memory_parts import StepWeights, read_elements
from experiment_core_utils.primitives.compute_records import GenerationFlops, HardwareUtilisation, ModelBytes
from experiment_core_utils.primitives.records import BatchRecord, InferenceResults, MeasuredSample


def share_of_peak(amount: float | None, seconds: float | None, peak_per_s: float | None) -> float | None:
    """`amount` a second as a share of a peak; None where one of them is not known, or there was no time."""
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
    """Of a text run, over the time of all its batches.

    The first token's time counts as prefill, the times between tokens as decode.

    Args:
        results: of one process, or pooled over all: each process computes on GPUs of its own.
        read_bytes: see `decode_read_bytes`.
        num_gpus: of each process.
        reasons: why something given is None.
    """
    firsts = [batch["ttft_s"] for batch in results["batches"]]
    told = [first for first in firsts if first is not None]
    prefill_s = sum(told) * num_gpus if len(told) == len(firsts) else None
    decode_s = sum(sum(batch["inter_token_s"]) for batch in results["batches"]) * num_gpus
    silent = [] if prefill_s is not None else ["the model's own generate() tells of no single token"]
    missing = [each for each in (peaks.reason, flops["generation_flops_reason"], *silent, *reasons) if each is not None]
    return HardwareUtilisation(
        mfu_vision=None,
        mfu_prefill=share_of_peak(flops["prefill_flops"], prefill_s, peaks.flops_per_s),
        mfu_decode=share_of_peak(flops["decode_flops"], decode_s, peaks.flops_per_s),
        mbu_decode=share_of_peak(read_bytes, decode_s, peaks.bytes_per_s),
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


def setting_utilisation(
    samples: Sequence[MeasuredSample], model: ModelBytes | None, peaks: Peaks
) -> HardwareUtilisation:
    """Of a setting of the knobs: means over the samples that were measured and have the stage."""
    runs = [(sample, sample.run) for sample in samples]
    measured = [(sample, run, sample.flops) for sample, run in runs if run is not None and sample.flops is not None]
    flops_peak = peaks.flops_per_s
    silent = "the model does not tell its bytes" if model is None else None
    if not measured:
        silent = "no sample with known operations was measured"
    decode = [
        (sample.shape.prompt_tokens, len(run.inter_token_s), run.decode_s, flops.decode_flops_per_token)
        for sample, run, flops in measured
    ]
    return HardwareUtilisation(
        mfu_vision=_mean([share_of_peak(flops.vision_flops, run.vision_s, flops_peak) for _, run, flops in measured]),
        mfu_prefill=_mean(
            [share_of_peak(flops.prefill_flops, run.prefill_s, flops_peak) for _, run, flops in measured]
        ),
        mfu_decode=_mean(
            [share_of_peak(None if each is None else each * steps, time, flops_peak) for _, steps, time, each in decode]
        ),
        mbu_decode=None
        if model is None
        else _mean(
            [
                share_of_peak(_steps_bytes(model, prompt, steps), time, peaks.bytes_per_s)
                for prompt, steps, time, _ in decode
            ]
        ),
        peak_flops_per_s=flops_peak,
        peak_bytes_per_s=peaks.bytes_per_s,
        peak_dtype=peaks.dtype,
        utilisation_reason=peaks.reason or silent,
    )


def _steps_bytes(model: ModelBytes, prompt_tokens: int, steps: int) -> float:
    """Step i (from 1) attends to the prompt and i generated tokens."""
    keys = steps * prompt_tokens + steps * (steps + 1) // 2
    return steps * model.step_weights_bytes + keys * model.cache_bytes_per_token


def _mean(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None
