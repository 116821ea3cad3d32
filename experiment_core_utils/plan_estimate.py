"""In: what each setting computes, and what was measured before; out: estimates of time and memory, and their table.

An estimate takes the best source that there is, and says which: the setting's own earlier measurement; the throughput
of each stage in earlier measurements of the same model on the same device, applied to the setting's operations; or the
throughput of a matrix product alone, which a whole model does not reach.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.primitives.records import StageFlops
from experiment_core_utils.primitives.units import span
from experiment_core_utils.setting_result import SettingResult

Source = Literal["measured", "scaled", "matmul"]
MEBIBYTE = 2**20


@dataclass(frozen=True)
class SettingWork:
    """What one request at a setting is, by formula.

    Attributes:
        key: names the setting.
        prompt_tokens: mean positions of the prefill.
        flops: mean operations of each stage; `decode_flops_per_token` is None where an answer has one token at most.
        memory_bytes: weights, cache and largest activations of the largest request that the setting allows.
        is_done: its result is there already.
    """

    key: str
    prompt_tokens: float
    flops: StageFlops
    memory_bytes: int
    is_done: bool


@dataclass(frozen=True)
class StageRates:
    """Operations per second that earlier measurements reached in each stage."""

    vision: float | None
    prefill: float
    decode: float | None


@dataclass(frozen=True)
class EarlierResults:
    """What the results of the same model, device and precision say.

    Attributes:
        by_key: setting's key -> result, of the same task and split.
        rates: medians over all of them, of whatever task; None where there are none.
        output_tokens: mean length of an answer over `by_key`; None where there are none.
        num_results: how many stand behind `rates`.
    """

    by_key: Mapping[str, SettingResult]
    rates: StageRates | None
    output_tokens: float | None
    num_results: int


@dataclass(frozen=True)
class SettingEstimate:
    """Time and memory of a setting; `request_s` is one run of one sample, `setting_s` all that one process does."""

    work: SettingWork
    request_s: float
    setting_s: float
    time_source: Source
    memory_bytes: int
    memory_is_measured: bool


@dataclass(frozen=True)
class PlanSize:
    """How often each setting runs a request: samples of the whole run, and what is done with each."""

    num_samples: int
    num_runs_per_sample: int
    num_warmup_runs: int
    num_processes: int

    @property
    def samples_a_process(self) -> int:
        """The largest share of a process, which the others wait for."""
        return math.ceil(self.num_samples / self.num_processes)

    @property
    def requests_a_process(self) -> int:
        """Runs of a process at each setting, the unmeasured ones counted."""
        return self.samples_a_process * self.num_runs_per_sample + self.num_warmup_runs


def rates_of(results: Iterable[SettingResult]) -> StageRates | None:
    """Median operations per second of each stage over results; None where no result has a prefill."""
    vision: list[float] = []
    prefill: list[float] = []
    decode: list[float] = []
    for result in results:
        for rates, flops, milliseconds in (
            (vision, "vision_flops_mean", "T_vision_total_mean"),
            (prefill, "prefill_flops_mean", "T_LLM_prefill_mean"),
            (decode, "decode_flops_per_token_mean", "T_decode_per_token_mean"),
        ):
            operations, time_ms = result.aggregate_stats.get(flops), result.aggregate_stats.get(milliseconds)
            if operations is not None and time_ms:
                rates.append(operations / (time_ms * 1e-3))
    if not prefill:
        return None
    return StageRates(
        statistics.median(vision) if vision else None,
        statistics.median(prefill),
        statistics.median(decode) if decode else None,
    )


def request_seconds(flops: StageFlops, output_tokens: float, rates: StageRates) -> float:
    """Time of one request: operations of each stage over its rate. A stage without a rate takes the prefill's."""
    vision = (flops.vision_flops or 0) / (rates.vision or rates.prefill)
    decode_flops = (flops.decode_flops_per_token or 0) * max(output_tokens - 1, 0)
    return vision + flops.prefill_flops / rates.prefill + decode_flops / (rates.decode or rates.prefill)


def estimate_setting(
    work: SettingWork, size: PlanSize, earlier: EarlierResults, output_tokens: float, matmul_rate: float | None
) -> SettingEstimate:
    """One setting, from the best source there is.

    Args:
        output_tokens: expected length of an answer.
        matmul_rate: operations per second of a matrix product; needed where `earlier` has no rates.
    """
    result = earlier.by_key.get(work.key)
    preprocess_s = 0.0
    if result is not None:
        total_ms, preprocess_ms = (result.aggregate_stats[f"{name}_mean"] for name in ("T_total", "T_preprocess"))
        assert total_ms is not None and preprocess_ms is not None
        source: Source = "measured"
        request_s, preprocess_s = total_ms * 1e-3, preprocess_ms * 1e-3
    elif earlier.rates is not None:
        source, request_s = "scaled", request_seconds(work.flops, output_tokens, earlier.rates)
    else:
        assert matmul_rate is not None
        rates = StageRates(matmul_rate, matmul_rate, matmul_rate)
        source, request_s = "matmul", request_seconds(work.flops, output_tokens, rates)
    memory = result.memory if result is not None else None
    peak = memory.peak_memory_bytes if memory is not None else None
    return SettingEstimate(
        work=work,
        request_s=request_s,
        setting_s=request_s * size.requests_a_process + preprocess_s * size.samples_a_process,
        time_source=source,
        memory_bytes=work.memory_bytes if peak is None else int(peak),
        memory_is_measured=peak is not None,
    )


def plan_table(estimates: Sequence[SettingEstimate]) -> list[str]:
    """The settings in their order, a line each, under a heading."""
    width = max(len("setting"), *(len(each.work.key) for each in estimates))
    heading = f"{'#':>4}  {'setting':<{width}}  {'tokens':>7}  {'s/request':>9}  {'time':>10}  {'memory':>11}  estimate"
    lines = [heading]
    for number, each in enumerate(estimates, start=1):
        source = "done already" if each.work.is_done else each.time_source
        memory = f"{each.memory_bytes / MEBIBYTE:.0f} MiB"
        time_text = "-" if each.work.is_done else span(each.setting_s)
        lines.append(
            f"{number:>4}  {each.work.key:<{width}}  {each.work.prompt_tokens:>7.0f}  {each.request_s:>9.3g}  "
            f"{time_text:>10}  {memory:>11}  {source}"
        )
    return lines


def due_seconds(estimates: Sequence[SettingEstimate]) -> float:
    """Time of the settings that are still to be measured."""
    return sum(each.setting_s for each in estimates if not each.work.is_done)


def size_sentence(size: PlanSize) -> str:
    """What is done at each setting."""
    processes = "1 process" if size.num_processes == 1 else f"{size.num_processes} processes"
    return (
        f"each: {size.num_samples} samples x {size.num_runs_per_sample} runs, {size.num_warmup_runs} warm-up runs a "
        f"process, {processes}"
    )


def plan_total(estimates: Sequence[SettingEstimate]) -> str:
    """The whole in one line: settings due, their time, the most memory."""
    due = [each for each in estimates if not each.work.is_done]
    most = max(each.memory_bytes for each in estimates)
    return (
        f"whole: {len(due)} of {len(estimates)} settings to measure, about {span(due_seconds(estimates))}, "
        f"most memory {most / MEBIBYTE:.0f} MiB"
    )


def source_sentences(
    estimates: Sequence[SettingEstimate], earlier: EarlierResults, output_tokens: float, matmul_rate: float | None
) -> list[str]:
    """Where the figures come from, and how far they can be trusted; one line a source that was used."""
    used = {each.time_source for each in estimates if not each.work.is_done}
    sentences = {
        "measured": "time, measured: T_total and T_preprocess of the setting's earlier result in --output_dir",
        "scaled": f"time, scaled: operations of each stage over the throughput of {earlier.num_results} earlier "
        f"results in --output_dir (same model, device, precision), answers of {output_tokens:.1f} tokens",
        "matmul": f"time, matmul: ROUGH, operations over the speed of a matrix product measured now "
        f"({(matmul_rate or math.nan) / 1e9:.0f} GFLOP/s), which a whole model does not reach, and answers as long as "
        f"allowed ({output_tokens:.0f} tokens); the first results in --output_dir make it better",
    }
    lines = [sentence for source, sentence in sentences.items() if source in used]
    measured = sum(each.memory_is_measured for each in estimates)
    if measured:
        lines.append(f"memory: peak of the earlier result for {measured} settings")
    if measured < len(estimates):
        lines.append(
            "memory: by formula, bytes of all weights, cache of the longest prompt and (of MolmoE only) largest "
            "activations of the largest picture that the setting allows; without the reserve of the allocator and of "
            "the device"
        )
    lines.append(
        "not in the time: start, loading, the proof that knobs act, unmeasured runs for new tilings, scoring, retries"
    )
    return lines
