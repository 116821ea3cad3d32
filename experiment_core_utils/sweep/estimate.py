"""Estimates of a plan's time and memory, from formulas and from earlier measurements.

An estimate takes the best source that there is, and says which: the setting's own earlier measurement; the throughput
of each stage in earlier measurements of the same model on the same device, applied to the setting's operations; or, for
MolmoE alone, the throughput of a matrix product, which a whole model does not reach. No source but the first counts the
fixed cost of each step, which is nearly all the time of a tiny model. Where there is no source there is no estimate,
and the plan says why.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from experiment_core_utils.b_model_loader import ModelSource
from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.knobs.vision_tokens import CropRange, vision_of
from experiment_core_utils.models.costs.architecture import (
    Architecture,
    UnknownArchitecture,
    architecture_of,
    shapes_of,
)
from experiment_core_utils.models.costs.decoder import BlockShape
from experiment_core_utils.models.costs.memory import cache_elements
from experiment_core_utils.models.hf.loader import HFSource, skeleton_of
from experiment_core_utils.models.hf.requests import check_prompt
from experiment_core_utils.models.hf.tilings import Tiling, tilings_within
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.models.molmoe.costs import activation_elements, parameter_count
from experiment_core_utils.models.molmoe.loader import load_processor
from experiment_core_utils.models.molmoe.processing_molmoe import refuse_several_pictures
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, library_faults_named
from experiment_core_utils.primitives.units import span
from experiment_core_utils.records.provenance import FinalPrompt
from experiment_core_utils.records.requests import PreparedRequest, RequestShape, RequestSize, StageFlops
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.prompt_forms import prompt_for

Source = Literal["measured", "scaled", "matmul"]
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
    """Time and memory of a setting; `request_s` is one run of one sample, `setting_s` all that one process does.

    Both, and their source, are None where there is nothing to go by; the memory where it is not known either.
    """

    work: SettingWork
    request_s: float | None
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

    @property
    def samples_per_process(self) -> int:
        """Samples of the largest shard, which the other processes wait for."""
        return math.ceil(self.num_samples / self.num_processes)

    @property
    def requests_per_process(self) -> int:
        """Runs of a process at each setting, the unmeasured ones counted."""
        return self.samples_per_process * self.num_runs_per_sample + self.num_warmup_runs


def rates_of(results: Iterable[SettingResult]) -> StageRates | None:
    """Median operations per second of each stage over results; None where no result has a prefill."""
    every = [result.aggregate_stats for result in results]

    def median_rate(flops: str, milliseconds: str) -> float | None:
        both = [(stats.get(flops), stats.get(milliseconds)) for stats in every]
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
    request_s: float | None = None
    preprocess_s = 0.0
    if result is not None:
        total_ms, preprocess_ms = (result.aggregate_stats[f"{name}_mean"] for name in ("T_total", "T_preprocess"))
        assert total_ms is not None and preprocess_ms is not None
        source, request_s, preprocess_s = "measured", total_ms * 1e-3, preprocess_ms * 1e-3
    elif work.flops is not None and rates is not None:
        source, request_s = "scaled", request_seconds(work.flops, output_tokens, rates)
    elif work.flops is not None and matmul_rate is not None:
        rates = StageRates(matmul_rate, matmul_rate, matmul_rate)
        source, request_s = "matmul", request_seconds(work.flops, output_tokens, rates)
    memory = result.memory if result is not None else None
    peak = memory.peak_memory_bytes if memory is not None else None
    return SettingEstimate(
        work=work,
        request_s=request_s,
        setting_s=None
        if request_s is None
        else request_s * size.requests_per_process + preprocess_s * size.samples_per_process,
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
        source = "done already" if each.work.is_done else each.time_source or "none"
        memory = "-" if each.memory_bytes is None else _mebibytes(each.memory_bytes)
        time_text = "-" if each.work.is_done or each.setting_s is None else _duration(each.setting_s)
        request_text = "-" if each.request_s is None else f"{each.request_s:.3g}"
        tokens = "-" if each.work.prompt_tokens is None else f"{each.work.prompt_tokens:.0f}"
        lines.append(
            f"{number:>4}  {each.work.key:<{width}}  {tokens:>7}  {request_text:>9}  "
            f"{time_text:>10}  {memory:>11}  {source}"
        )
    return lines


def due_seconds(estimates: Sequence[SettingEstimate]) -> float | None:
    """Time of the settings that are still to be measured; None where one of them has no estimate."""
    times = [each.setting_s for each in estimates if not each.work.is_done]
    known = [each for each in times if each is not None]
    return sum(known) if len(known) == len(times) else None


def size_sentence(size: PlanSize) -> str:
    """What is done at each setting."""
    processes = "1 process" if size.num_processes == 1 else f"{size.num_processes} processes"
    return (
        f"each: {size.num_samples} samples x {size.num_runs_per_sample} runs, {size.num_warmup_runs} warm-up runs a "
        f"process, {processes}"
    )


def plan_total(estimates: Sequence[SettingEstimate]) -> str:
    """The whole in one line: settings due, their time and the most memory, where these are known."""
    due = [each for each in estimates if not each.work.is_done]
    seconds = due_seconds(estimates)
    memories = [each.memory_bytes for each in estimates if each.memory_bytes is not None]
    time_text = "" if seconds is None else f", about {_duration(seconds)}"
    memory_text = f", most memory {_mebibytes(max(memories))}" if memories else ""
    return f"whole: {len(due)} of {len(estimates)} settings to measure{time_text}{memory_text}"


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
    used = {each.time_source for each in estimates if not each.work.is_done}
    sentences = {
        "measured": "time, measured: from the setting's earlier result in --output_dir",
        "scaled": f"time, scaled: FLOPs of each stage / its speed in {earlier.num_results} earlier results in "
        f"--output_dir (same model, device, precision), for answers of {output_tokens:.1f} tokens",
        "matmul": f"time, matmul: ROUGH, no earlier run to go by: FLOPs / speed of a matrix product measured now "
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
        lines.append(f"memory: peak of the earlier result for {measured} settings")
    if any(each.memory_bytes is not None and not each.memory_is_measured for each in estimates):
        lines.append(
            "memory: by formula, for all weights, the cache of the longest prompt and (MolmoE only) the largest "
            "activations; what allocator and device reserve is not included"
        )
    if used != {None}:
        lines.append("not in the time: loading, checks of the knobs, unmeasured runs for new tilings, scoring, retries")
    return lines


# Samples whose pictures are opened for their shape.
INSPECTED_SAMPLES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class RequestWork:
    """A request of the mean size of those looked at; of the largest one the elements held beside the weights."""

    prompt_tokens: float | None  #: None where none of those looked at can be run
    flops: StageFlops | None  #: None where no formula is known for the architecture
    elements: int | None  #: cache and, where they are known, the largest activations; None without a formula
    unusable_reason: str | None = None  #: why the first of those that cannot be run cannot, such as too long a prompt


def work_of(source: ModelSource, task: Task, sample_ids: Sequence[int], limit: int) -> "MolmoeWork | TransformersWork":
    """What requests with answers of at most `limit` tokens are.

    Raises:
        ConfigurationError: none of the samples can be read.
    """
    if source.hf is not None:
        return TransformersWork(source.hf, task, sample_ids, limit)
    return MolmoeWork(source, task, sample_ids, limit)


def of_first_samples(
    task: Task, sample_ids: Sequence[int], look: Callable[[Sample], T], most: int = INSPECTED_SAMPLES
) -> list[T]:
    """What is seen in the first few samples that can be read."""
    seen: list[T] = []
    reason = ""
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"):
                seen.append(look(task[sample_id]))
        except SampleError as error:
            reason = str(error)
        if len(seen) == most:
            break
    if not seen:
        raise ConfigurationError(
            f"none of the {len(sample_ids)} samples of {task.name} {task.split} that were drawn can be read, the last "
            f"because: {reason}; give others with --seed or --ids"
        )
    return seen


def mean_flops(flops: Sequence[StageFlops]) -> StageFlops:
    """Mean FLOPs of each stage, over requests; vision over those without a picture too."""
    vision = [each.vision_flops or 0 for each in flops]
    decode = [each.decode_flops_per_token for each in flops if each.decode_flops_per_token is not None]
    return StageFlops(
        vision_flops=round(statistics.fmean(vision)) if any(vision) else None,
        prefill_flops=round(statistics.fmean(each.prefill_flops for each in flops)),
        decode_flops_per_token=statistics.fmean(decode) if decode else None,
    )


@dataclass(frozen=True)
class PromptShape:
    """A sample's picture (height, width; None without one) and its tokens other than the picture's."""

    size: tuple[int, int] | None
    text_tokens: int


class MolmoeWork:
    """Work of MolmoE requests: a picture's size alone determines its crops."""

    no_formula: str | None = None  #: why there are no operations and no memory

    def __init__(self, source: ModelSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        self._source = source
        self._limit = limit
        self._processor = load_processor(source)
        self.weight_elements = parameter_count(source.config)
        self.shapes = of_first_samples(task, sample_ids, lambda sample: self._shape(task, sample))
        self.num_samples = len(self.shapes)
        self._first = of_first_samples(task, sample_ids, lambda sample: (sample, task.prompt(sample)), 1)[0]

    def final_prompt(self, setting: Setting) -> FinalPrompt:
        """What the model is given of the first sample that can be read."""
        sample, prompt = self._first
        inputs = self._processor(prompt, sample.image, vision_of(setting).bounds)
        return FinalPrompt.of_ids(sample.sample_id, prompt, inputs["input_ids"][0].tolist())

    def at(self, setting: Setting) -> RequestWork:
        """A request at the setting; elements contain the largest activations."""
        tokens, flops = [], []
        architecture = Architecture("molmoe", *shapes_of(self._source.config))
        architecture = architecture.at(setting)
        for shape in self.shapes:
            crops, image_tokens = 0, 0
            if shape.size is not None:
                tiling = self._processor.image_processor.tiling_for(*shape.size, vision_of(setting).bounds)
                crops, image_tokens = tiling[0] * tiling[1] + 1, image_part_tokens(self._processor, tiling, setting)
            tokens.append(shape.text_tokens + image_tokens)
            flops.append(architecture.request_flops(RequestSize(tokens[-1], self._limit, crops=crops)).stages)
        return RequestWork(
            statistics.fmean(tokens), mean_flops(flops), self._largest_elements(setting, architecture.decoder.blocks)
        )

    def _shape(self, task: Task, sample: Sample) -> PromptShape:
        refuse_several_pictures(sample)
        prompt = task.prompt(sample)
        check_prompt(prompt, self._processor.tokenizer, self._source.config)
        text_tokens = self._processor(prompt)["input_ids"].shape[1]
        size = None if sample.image is None else (sample.image.height, sample.image.width)
        return PromptShape(size, text_tokens)

    def _largest_elements(self, setting: Setting, blocks: Sequence[BlockShape]) -> int:
        """Cache and largest activations of the largest picture that the setting allows and the longest text seen."""
        text_tokens = max(shape.text_tokens for shape in self.shapes)
        crops, image_tokens = 0, 0
        if any(shape.size is not None for shape in self.shapes):
            allowed = vision_of(setting).bounds or CropRange(1, self._processor.image_processor.max_crops)
            crops = allowed.max_crops + 1
            image_tokens = max(
                image_part_tokens(self._processor, tiling, setting) for tiling in tilings_within(allowed)
            )
        prompt_tokens = text_tokens + image_tokens
        own = self._source.limits.default_top_k or 0
        top_k = max(own, experts_of(setting) or 0) if len(blocks_of(setting)) > 1 else own
        cache = cache_elements(blocks, prompt_tokens + self._limit)
        return cache + activation_elements(self._source.config, crops, prompt_tokens, top_k)


def image_part_tokens(processor: MolmoeProcessor, tiling: Tiling, setting: Setting | None = None) -> int:
    """Tokens that a picture of this tiling puts into the prompt, markers counted; as the decoder gets them at a
    setting.
    """
    images, ids = processor.image_processor, processor.image_tokens
    layout = ids.layout(images.features_per_side, images.stitched_features(tiling))
    features = layout.count(ids.patch)
    shape = RequestShape(None, None, features, len(layout) - features, 0, 0.0)
    return (shape if setting is None else setting.shape(shape)).prompt_tokens


class TransformersWork:
    """Work of requests to a model of transformers: its processor makes the requests, and their tokens and crops are
    counted.
    """

    def __init__(self, source: HFSource, task: Task, sample_ids: Sequence[int], limit: int) -> None:
        found = architecture_of(source.config)
        #: why there are no operations and no memory; None where there are
        self.no_formula = found.reason if isinstance(found, UnknownArchitecture) else None
        self._architecture = None if isinstance(found, UnknownArchitecture) else found
        self._task = task
        self._limit = limit
        self._requests = source.requests
        self._samples = of_first_samples(task, sample_ids, lambda sample: sample)
        self.num_samples = len(self._samples)
        self._shapes: dict[CropRange | None, tuple[list[RequestShape], str | None]] = {}
        self.weight_elements = sum(parameter.numel() for parameter in skeleton_of(source).parameters())

    def final_prompt(self, setting: Setting) -> FinalPrompt | None:
        """What the model is given of the first sample that can be used; None where none can."""
        for sample in self._samples:
            try:
                request = self._made(sample, vision_of(setting).bounds)
            except SampleError:  # not counted: `at` gives the reason
                continue
            return FinalPrompt.of_ids(sample.sample_id, request.text, request.inputs["input_ids"][0].tolist())
        return None

    def at(self, setting: Setting) -> RequestWork:
        """A request at the setting; elements are the cache's alone, of the longest prompt seen."""
        shapes, reason = self._shapes_at(vision_of(setting).bounds)
        if not shapes:
            return RequestWork(None, None, None, reason)
        shapes = [setting.shape(shape) for shape in shapes]
        tokens = [shape.prompt_tokens for shape in shapes]
        if self._architecture is None:
            return RequestWork(statistics.fmean(tokens), None, None, reason)
        architecture = self._architecture.at(setting)
        flops = [architecture.request_flops(shape.size(self._limit)).stages for shape in shapes]
        elements = cache_elements(architecture.decoder.blocks, max(tokens) + self._limit)
        return RequestWork(statistics.fmean(tokens), mean_flops(flops), elements, reason)

    def _shapes_at(self, crops: CropRange | None) -> tuple[list[RequestShape], str | None]:
        """Those of the samples that can be run, and why the first that cannot be run cannot."""
        if crops not in self._shapes:
            shapes, reasons = [], []
            for sample in self._samples:
                try:
                    shapes.append(self._made(sample, crops).shape)
                except SampleError as error:
                    reasons.append(str(error))
            self._shapes[crops] = shapes, next(iter(reasons), None)
        return self._shapes[crops]

    def _made(self, sample: Sample, crops: CropRange | None) -> PreparedRequest:
        return self._requests.make(sample, prompt_for(self._task, sample, self._requests.prompt_family), crops)
