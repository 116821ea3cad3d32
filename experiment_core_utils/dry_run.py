"""In: a configuration; out: the plan of its run with estimates, as text. No weights are loaded, nothing is written.

Facts are gathered here (config of the model, pictures of a few samples, earlier results, a matrix product); what
follows from them is computed in `plan_estimate.py`.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.a_distributed import processes_on_this_machine, setup_distributed
from experiment_core_utils.b_model_loader import ModelSource, find_model, load_processor
from experiment_core_utils.c_prompt_processing import draw_samples, open_task
from experiment_core_utils.f_experiment_info import describe_hardware
from experiment_core_utils.fingerprint import agreed_fingerprint, max_new_tokens_of
from experiment_core_utils.l_results_csv_cleaning import RESULT_FILES, read_results, setting_key
from experiment_core_utils.models.molmoe import MolmoeProcessor
from experiment_core_utils.models.molmoe.flops import request_flops
from experiment_core_utils.models.molmoe.image_processing_molmoe import Tiling, tilings_within
from experiment_core_utils.models.molmoe.memory import activation_elements, cache_elements, parameter_count
from experiment_core_utils.pipeline import plan_for
from experiment_core_utils.plan_estimate import (
    EarlierResults,
    PlanSize,
    SettingEstimate,
    SettingWork,
    due_seconds,
    estimate_setting,
    plan_table,
    plan_total,
    rates_of,
    size_sentence,
    source_sentences,
)
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import (
    choose_device,
    choose_dtype,
    matmul_flops_per_second,
    set_cpu_threads,
)
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import StageFlops
from experiment_core_utils.progress import Ledger
from experiment_core_utils.tasks.interface import Task

# Samples whose pictures are opened for their shape.
SAMPLES_LOOKED_AT = 8


@dataclass(frozen=True)
class PlanReport:
    """A plan with its estimates, the same on every process; one of them prints it.

    Attributes:
        whole_s: estimated time of the settings that are still to be measured.
    """

    is_main_process: bool
    estimates: tuple[SettingEstimate, ...]
    whole_s: float
    text: str


@dataclass(frozen=True)
class PromptShape:
    """A sample's picture (height, width; None without one) and its tokens other than the picture's."""

    size: tuple[int, int] | None
    text_tokens: int


def describe_plan(config: ProfilingConfig) -> PlanReport:
    """The settings in order, each with estimated time and memory, and the whole.

    Raises:
        ConfigurationError: what would also stop the run, or none of the first samples can be read.
    """
    source = find_model(config.model_path, config.hf_cache_dir)
    settings = plan_for(config, source)
    task = open_task(config)
    drawn = draw_samples(task, config)
    accelerator = setup_distributed(config)
    device = choose_device(config.device, accelerator.local_process_index)
    set_cpu_threads(config.num_threads, processes_on_this_machine(accelerator))
    dtype = choose_dtype(config.precision, device)
    processor = load_processor(source)
    shapes = shapes_of(task, drawn.sample_ids, processor)
    ledger = Ledger(config.output_dir, agreed_fingerprint(config, source, task, drawn.sample_ids, accelerator))
    earlier = earlier_results(config, source, task, device, dtype)
    limit = max_new_tokens_of(config, task)
    output_tokens = limit if earlier.output_tokens is None else earlier.output_tokens
    size = PlanSize(len(drawn), config.num_runs_per_sample, config.num_warmup_runs, accelerator.num_processes)
    matmul_rate = matmul_flops_per_second(device, dtype) if earlier.rates is None else None
    weights_bytes = parameter_count(source.config) * dtype.itemsize
    estimates = []
    for setting in settings:
        elements = largest_request_elements(source, processor, setting, shapes, limit)
        prompt_tokens, flops = mean_work(source, processor, setting, shapes, limit)
        is_done = ledger.result(setting.key) is not None
        memory_bytes = weights_bytes + elements * dtype.itemsize
        work = SettingWork(setting.key, prompt_tokens, flops, memory_bytes, is_done)
        estimates.append(estimate_setting(work, size, earlier, output_tokens, matmul_rate))
    lines = [
        f"plan: {len(settings)} settings by {config.sampling_strategy}, {source.name} on {task.name} {task.split}, "
        f"{device.type} {str(dtype).removeprefix('torch.')}; no weights were loaded",
        size_sentence(size),
        *plan_table(estimates),
        plan_total(estimates),
        *source_sentences(estimates, earlier, output_tokens, matmul_rate),
        f"tokens: prompts of the first {len(shapes)} samples that can be read",
        *less_sentences(config, len(drawn)),
    ]
    return PlanReport(accelerator.is_main_process, tuple(estimates), due_seconds(estimates), "\n".join(lines))


def less_sentences(config: ProfilingConfig, num_drawn: int) -> list[str]:
    """Why a run may take less than the estimate, which counts every sample drawn as measured at every setting."""
    reasons = []
    if config.pareto_search:
        reasons.append("--pareto_search stops at a third of this model time")
    if config.until_precision is not None:
        reasons.append("--until_precision may end each setting before its last sample")
    if config.num_latency_samples is not None and config.num_latency_samples < num_drawn:
        reasons.append(
            f"--num_latency_samples: {config.num_latency_samples} of {num_drawn} samples are measured, the others only "
            "answered"
        )
    return [f"at most: {reason}" for reason in reasons]


def shapes_of(task: Task, sample_ids: Sequence[int], processor: MolmoeProcessor) -> list[PromptShape]:
    """Shapes of the first few samples that can be read."""
    shapes, reason = [], ""
    for sample_id in sample_ids[:SAMPLES_LOOKED_AT]:
        try:
            sample = task[sample_id]
        except SampleError as error:
            reason = str(error)
            continue
        text_tokens = processor(task.prompt(sample))["input_ids"].shape[1]
        size = None if sample.image is None else (sample.image.height, sample.image.width)
        shapes.append(PromptShape(size, text_tokens))
    if not shapes:
        raise ConfigurationError(
            f"none of the first {len(sample_ids[:SAMPLES_LOOKED_AT])} samples of {task.name} {task.split} can be read, "
            f"the last because: {reason}; give others with --seed or --ids"
        )
    return shapes


def mean_work(
    source: ModelSource, processor: MolmoeProcessor, setting: KnobSetting, shapes: Sequence[PromptShape], limit: int
) -> tuple[float, StageFlops]:
    """Mean tokens of the prompts and mean operations of each stage over the shapes."""
    tokens, flops = [], []
    for shape in shapes:
        crops, image_tokens = 0, 0
        if shape.size is not None:
            tiling = processor.image_processor.tiling_for(*shape.size, setting.vision.crops)
            crops, image_tokens = tiling[0] * tiling[1] + 1, image_part_tokens(processor, tiling)
        tokens.append(shape.text_tokens + image_tokens)
        flops.append(request_flops(source.config, setting, crops, tokens[-1], limit))
    vision = [each.vision_flops or 0 for each in flops]
    decode = [each.decode_flops_per_token for each in flops if each.decode_flops_per_token is not None]
    return statistics.fmean(tokens), StageFlops(
        vision_flops=round(statistics.fmean(vision)) if any(vision) else None,
        prefill_flops=round(statistics.fmean(each.prefill_flops for each in flops)),
        decode_flops_per_token=statistics.fmean(decode) if decode else None,
    )


def largest_request_elements(
    source: ModelSource, processor: MolmoeProcessor, setting: KnobSetting, shapes: Sequence[PromptShape], limit: int
) -> int:
    """Cache and largest activations of the largest picture that the setting allows and the longest text seen."""
    text_tokens = max(shape.text_tokens for shape in shapes)
    crops, image_tokens = 0, 0
    if any(shape.size is not None for shape in shapes):
        most = setting.vision.crops.max_crops
        crops = most + 1
        image_tokens = max(image_part_tokens(processor, tiling) for tiling in tilings_within(setting.vision.crops))
    prompt_tokens = text_tokens + image_tokens
    top_k = max(source.default_top_k, setting.top_k) if setting.num_active_blocks > 1 else source.default_top_k
    cache = cache_elements(source.config, prompt_tokens + limit, setting.num_active_blocks)
    return cache + activation_elements(source.config, crops, prompt_tokens, top_k)


def image_part_tokens(processor: MolmoeProcessor, tiling: Tiling) -> int:
    """Tokens that a picture of this tiling puts into the prompt, markers counted."""
    images = processor.image_processor
    return len(processor.image_tokens.layout(images.features_per_side, images.stitched_features(tiling)))


def earlier_results(
    config: ProfilingConfig, source: ModelSource, task: Task, device: torch.device, dtype: torch.dtype
) -> EarlierResults:
    """What results of the same model, hardware and precision in the output folder say; empty where there are none."""
    folder = config.output_dir
    found = list(read_results(folder).values()) if folder.is_dir() and any(folder.glob(RESULT_FILES)) else []
    same = [result for result in found if is_comparable(result["provenance"], config, source, device, dtype)]
    of_task = {
        setting_key(result): result
        for result in same
        if (result["provenance"]["task"]["name"], result["provenance"]["task"]["split"]) == (task.name, task.split)
    }
    lengths = [result["aggregate_stats"]["output_tokens_mean"] for result in of_task.values()]
    return EarlierResults(of_task, rates_of(same), statistics.fmean(lengths) if lengths else None, len(same))


def is_comparable(
    provenance: Mapping[str, Any],
    config: ProfilingConfig,
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Whether times of that run are times of this one: model, precision, implementations asked for, hardware."""
    model, there, here = provenance["model"], provenance["hardware"], describe_hardware(device)
    same_hardware = (
        there["gpu_name"] == here["gpu_name"] is not None
        if device.type == "cuda"
        else there["device"] == "cpu" and (there["cpu"], there["torch_threads"]) == (here["cpu"], here["torch_threads"])
    )
    same_model = model["name"] == source.name and model["dtype"] == str(dtype).removeprefix("torch.")
    implementations = (
        (config.attn_implementation, model["attn_implementation"]),
        (config.experts_implementation, model["experts_implementation"]),
    )
    return same_hardware and same_model and all(asked in (None, used) for asked, used in implementations)
