"""Estimates of a plan's time and memory, from formulas and from earlier measurements.

Requests that arrive at a rate take the time in which they come. Any other estimate takes the best source that there
is, and says which: the setting's own earlier measurement; the throughput of each stage in earlier measurements of the
same model on the same device, applied to the setting's operations; or, for MolmoE alone, the throughput of a matrix
product, which a whole model does not reach. No source but the first counts the fixed cost of each step, which is nearly
all the time of a tiny model. Where there is no source there is no estimate, and the plan says why.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiment_core_utils.knobs.batch_size import BATCH_SIZE
from experiment_core_utils.measuring.arrivals import batch_size
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.primitives.units import span
from experiment_core_utils.records.requests import StageFlops
from experiment_core_utils.records.setting_result import SettingResult

Source = Literal["rate", "measured", "scaled", "matmul"]
MEBIBYTE = 2**20


@dataclass(frozen=True)
class SettingWork:
    """What one request at a setting is, by formula."""

    key: str  #: names the setting
    prompt_tokens: float | None  #: mean positions of the prefill; None where no sample that was looked at can be run
    #: mean operations of each stage; `decode_flops_per_token` is None where an answer has one token at most; None where
    #: no formula is known for the architecture
    flops: StageFlops | None
    #: weights, cache and largest activations of the largest request that the setting allows; None without a formula
    memory_bytes: int | None
    is_done: bool  #: its result is there already
    batch_size: int = 1  #: requests that run together, for which `flops` counts once


@dataclass(frozen=True)
class StageRates:
    """Operations per second that earlier measurements reached in each stage."""

    vision: float | None
    prefill: float
    decode: float | None


@dataclass(frozen=True)
class EarlierResults:
    """What the results of the same model, device and precision say."""

    by_key: Mapping[str, SettingResult]  #: setting's key -> result, of the same task and split
    rates: StageRates | None  #: medians over all of them, of whatever task; None where there are none
    output_tokens: float | None  #: mean length of an answer over `by_key`; None where there are none
    num_results: int  #: how many is behind `rates`


@dataclass(frozen=True)
class SettingEstimate:
    """Time and memory of a setting; `run_s` is a run of a sample with its batch, `setting_s` all that one process does.

    Both, and their source, are None where there is nothing to go by; the memory where it is not known either.
    """

    work: SettingWork
    run_s: float | None
    setting_s: float | None
    time_source: Source | None
    memory_bytes: int | None
    memory_is_measured: bool


@dataclass(frozen=True)
class PlanSize:
    """How often each setting runs a request: samples of the whole run, and what is done with each."""

    num_samples: int
    num_runs_per_sample: int
    num_warmup_runs: int
    num_processes: int
    request_rate: float | None = None  #: requests a second; None where each begins when the one before has ended
    num_timed: int | None = None  #: samples that are timed, the others are only answered; None for all
    num_sharing: int = 1  #: processes that share the weights of one model, and count as one above

    @property
    def timed(self) -> int:
        """Samples that are timed."""
        return self.num_samples if self.num_timed is None else self.num_timed

    @property
    def num_batches(self) -> int:
        """Batches in which the requests of a setting arrive, in all runs together."""
        return -(-self.timed // batch_size(self.timed)) * self.num_runs_per_sample

    @property
    def arrivals_s(self) -> float | None:
        """The time in which the requests of a setting arrive; None without a rate. Gaps of a batch of n are n - 1."""
        if self.request_rate is None:
            return None
        return (self.timed * self.num_runs_per_sample - self.num_batches) / self.request_rate

    @property
    def samples_per_process(self) -> int:
        """Samples of the largest shard, which the other processes wait for."""
        return math.ceil(self.num_samples / self.num_processes)

    @property
    def answered_per_process(self) -> int:
        """Samples of the largest shard that are only answered."""
        return self.samples_per_process - math.ceil(self.timed / self.num_processes)

    def answering_runs(self, batch_size: int) -> int:
        """Runs of a process at a setting for what is only answered, once, and as many together as what is timed."""
        return math.ceil(self.answered_per_process / batch_size)

    def runs_per_process(self, batch_size: int = 1) -> int:
        """Runs of a process at a setting, the unmeasured ones counted."""
        timed = self.samples_per_process - self.answered_per_process
        return timed * self.num_runs_per_sample + self.answering_runs(batch_size) + self.num_warmup_runs


def rates_of(results: Iterable[SettingResult]) -> StageRates | None:
    """Median operations per second of each stage over results; None where no result has a prefill."""
    every = [(result.knobs.get(BATCH_SIZE.name, 1), result.aggregate_stats) for result in results]

    def median_rate(flops: str, milliseconds: str) -> float | None:
        both = [(int(size) * (stats.get(flops) or 0) or None, stats.get(milliseconds)) for size, stats in every]
        rates = [operations / (time_ms * 1e-3) for operations, time_ms in both if operations is not None and time_ms]
        return statistics.median(rates) if rates else None

    prefill = median_rate("prefill_flops_mean", "T_LLM_prefill_mean")
    vision = median_rate("vision_flops_mean", "T_vision_total_mean")
    decode = median_rate("decode_flops_per_token_mean", "T_decode_per_token_mean")
    return None if prefill is None else StageRates(vision, prefill, decode)


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
        matmul_rate: operations per second of a matrix product, which stands in where `earlier` has no rates; None for
            no estimate then.
    """
    result, rates = earlier.by_key.get(work.key), earlier.rates
    source: Source | None = None
    run_s: float | None = None
    preprocess_s = 0.0
    total_ms = None if result is None else result.aggregate_stats["T_total_mean"]
    if result is not None and total_ms is not None:
        preprocess_s = (result.aggregate_stats["T_preprocess_mean"] or 0.0) * 1e-3
        source, run_s = "measured", total_ms * 1e-3
    elif work.flops is not None and rates is not None:
        source, run_s = "scaled", work.batch_size * request_seconds(work.flops, output_tokens, rates)
    elif work.flops is not None and matmul_rate is not None:
        rates = StageRates(matmul_rate, matmul_rate, matmul_rate)
        source, run_s = "matmul", work.batch_size * request_seconds(work.flops, output_tokens, rates)
    setting_s: float | None = None
    if size.arrivals_s is not None:
        # The last of each batch, warm-up and what is only answered are waited for.
        alone = size.num_batches + size.num_warmup_runs + size.num_samples - size.timed
        source, setting_s = "rate", size.arrivals_s + (run_s or 0.0) * alone
    elif run_s is not None:
        setting_s = run_s * size.runs_per_process(work.batch_size) + preprocess_s * size.samples_per_process
    memory = result.memory if result is not None else None
    peak = memory.peak_memory_bytes if memory is not None else None
    return SettingEstimate(
        work=work,
        run_s=run_s,
        setting_s=setting_s,
        time_source=source,
        memory_bytes=work.memory_bytes if peak is None else int(peak),
        memory_is_measured=peak is not None,
    )


def plan_table(estimates: Sequence[SettingEstimate]) -> list[str]:
    """The settings in their order, a line each, under a heading."""
    width = max(len("setting"), *(len(estimate.work.key) for estimate in estimates))
    heading = f"{'#':>4}  {'setting':<{width}}  {'tokens':>7}  {'s/run':>9}  {'time':>10}  {'memory':>11}  estimate"
    lines = [heading]
    for number, each in enumerate(estimates, start=1):
        source = "done already" if each.work.is_done else each.time_source or "none"
        memory = "-" if each.memory_bytes is None else _mebibytes(each.memory_bytes)
        time_text = "-" if each.work.is_done or each.setting_s is None else _duration(each.setting_s)
        run_text = "-" if each.run_s is None else f"{each.run_s:.3g}"
        tokens = "-" if each.work.prompt_tokens is None else f"{each.work.prompt_tokens:.0f}"
        lines.append(
            f"{number:>4}  {each.work.key:<{width}}  {tokens:>7}  {run_text:>9}  "
            f"{time_text:>10}  {memory:>11}  {source}"
        )
    return lines


def due_seconds(estimates: Sequence[SettingEstimate]) -> float | None:
    """Time of the settings that are still to be measured; None where one of them has no estimate."""
    times = [estimate.setting_s for estimate in estimates if not estimate.work.is_done]
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None


def size_sentence(size: PlanSize) -> str:
    """What is done at each setting."""
    rate = size.request_rate
    at_rate = "" if rate is None else f"; {size.timed} of them are timed, at {rate:g} requests a second"
    sharing = size.num_sharing
    processes = counted(size.num_processes, "process") if sharing == 1 else f"{sharing} processes that share the model"
    return (
        f"each: {counted(size.num_samples, 'sample')} x {counted(size.num_runs_per_sample, 'run')}, "
        f"{counted(size.num_warmup_runs, 'warm-up run')} a process, "
        f"{processes}{at_rate}"
    )


def answered_lines(estimates: Sequence[SettingEstimate], size: PlanSize, batch: int | None) -> list[str]:
    """The line, if any, of samples that are only answered, with their part of the time that is still due.

    Args:
        batch: most that modules answer together; None where a server answers.
    """
    answered = size.num_samples - size.timed
    if not answered or size.request_rate is not None:
        return []
    due = [each for each in estimates if not each.work.is_done]
    known = [each.run_s * size.answering_runs(each.work.batch_size) for each in due if each.run_s is not None]
    is_known = bool(due) and len(known) == len(due)
    cost = f", about {_duration(sum(known))} of the time" if is_known else ""
    how = "" if batch is None else f" (one by one by engines and graphs; modules answer up to {batch} together)"
    return [
        f"answers: {answered} of {counted(size.num_samples, 'sample')} are not timed; each is answered once at each "
        f"setting, by what runs the timed ones{how}{cost}"
    ]


def shared_memory_lines(num_sharing: int, weights_bytes: int, each_bytes: int) -> list[str]:
    """The line that says what each of the processes that share a model has of it; none for one process.

    Args:
        weights_bytes: of all weights.
        each_bytes: of those that a process has, its part of the divided ones and all others.
    """
    if num_sharing == 1:
        return []
    return [
        f"memory: of the {num_sharing} processes together; of the weights ({_mebibytes(weights_bytes)}) each has "
        f"{_mebibytes(each_bytes)}"
    ]


def plan_total(estimates: Sequence[SettingEstimate]) -> str:
    """The whole in one line: settings due, their time and the most memory, where these are known."""
    due = [estimate for estimate in estimates if not estimate.work.is_done]
    seconds = due_seconds(estimates)
    memories = [each.memory_bytes for each in estimates if each.memory_bytes is not None]
    time_text = "" if seconds is None else f", about {_duration(seconds)}"
    memory_text = f", most memory {_mebibytes(max(memories))}" if memories else ""
    return f"whole: {len(due)} of {counted(len(estimates), 'setting')} to measure{time_text}{memory_text}"


def _duration(seconds: float) -> str:
    return span(seconds) if seconds >= 1 or seconds == 0 else f"{seconds:.2g} s"


def _mebibytes(size: int) -> str:
    mebibytes = size / MEBIBYTE
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.2g} MiB"


def source_sentences(
    estimates: Sequence[SettingEstimate],
    earlier: EarlierResults,
    output_tokens: float,
    matmul_rate: float | None,
    no_formula: str | None = None,
) -> list[str]:
    """Where the figures come from, and how far they can be trusted; one line a source that was used.

    Args:
        no_formula: why the architecture has no formula for FLOPs and memory; None where it has one.
    """
    used = {estimate.time_source for estimate in estimates if not estimate.work.is_done}
    sentences = {
        "rate": "time, rate: in which the requests of a setting come, whatever the server manages; each batch's last "
        "answer, warm-up and samples that are only answered come on top, by earlier results at this rate in "
        "--output_dir where there are some",
        "measured": "time, measured: from the setting's earlier result in --output_dir",
        "scaled": f"time, scaled: FLOPs of each stage / its speed in {earlier.num_results} earlier results in "
        f"--output_dir (same model, device, precision), for answers of {output_tokens:.1f} tokens",
        "matmul": f"time, matmul: a rough lower bound without an earlier run, FLOPs / speed of a matrix product, now "
        f"({(matmul_rate or math.nan) / 1e9:.0f} GFLOP/s), which a whole model does not reach, for the longest answers "
        f"allowed ({output_tokens:.0f} tokens); the fixed cost of each step is not counted, so that a tiny model takes "
        "orders of magnitude longer; measure two settings into --output_dir for a better estimate",
    }
    lines = [sentence for source, sentence in sentences.items() if source in used]
    if None in used:
        why = no_formula or "no earlier result in --output_dir to go by"
        lines.append(f"no estimate: {why}; measure the settings with a few samples into --output_dir, and plan again")
    measured = sum(each.memory_is_measured for each in estimates)
    if measured:
        lines.append(f"memory: peak of the earlier result for {counted(measured, 'setting')}")
    if any(each.memory_bytes is not None and not each.memory_is_measured for each in estimates):
        lines.append(
            "memory: by formula, for all weights, the cache of the longest prompt and (Molmo only) the largest "
            "activations; what allocator and device reserve is not included"
        )
    if used != {None}:
        lines.append("not in the time: loading, checks of the knobs, unmeasured runs for new tilings, scoring, retries")
    return lines
