"""The plan of a run with estimates of time and memory, without loading weights or writing files.

All rows of a data file are checked, of their pictures the headers.

Facts are gathered here (config of the model, pictures of a few samples, earlier results, a matrix product); what
follows from them is computed in `estimate.py`.
"""

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.a_distributed import setup_distributed
from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.f_experiment_info import describe_hardware
from experiment_core_utils.facts.variables import shown_endpoints
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.loading import Loading, loading_of
from experiment_core_utils.knobs.setting import reference_setting
from experiment_core_utils.l_results_csv_cleaning import read_results
from experiment_core_utils.meters.requested_energy import energy_plan_lines
from experiment_core_utils.models.request_work import unusable_lines, vision_lines
from experiment_core_utils.models.source import CheckpointSource, ModelSource
from experiment_core_utils.planning.estimate import (
    EarlierResults,
    SettingEstimate,
    SettingWork,
    answered_lines,
    due_seconds,
    estimate_setting,
    plan_table,
    plan_total,
    rates_of,
    shared_memory_lines,
    size_sentence,
    source_sentences,
)
from experiment_core_utils.planning.fingerprint import agreed_fingerprint
from experiment_core_utils.planning.plan import (
    RequestedRun,
    config_of_copy,
    left_out_by,
    loads_decided,
    max_new_tokens_of,
    plan_size,
    refuse_unfilled_batches,
    requested_run,
)
from experiment_core_utils.planning.remarks import (
    broken_rows,
    broken_rows_lines,
    data_remarks,
    knob_lines,
    replaced_results_lines,
)
from experiment_core_utils.planning.statistical_power import power_sentences, sweep_noise
from experiment_core_utils.primitives.collectives import processes_on_this_machine
from experiment_core_utils.primitives.device import (
    choose_device,
    choose_dtype,
    matmul_flops_per_second,
    set_cpu_threads,
)
from experiment_core_utils.primitives.errors import EXIT_CODE_FAILED_SAMPLES, ConfigurationError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.provenance import ASKED_AT, FinalPrompt, Provenance
from experiment_core_utils.records.result_files import RESULT_FILES
from experiment_core_utils.records.setting_result import setting_key
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import get_metric, score_name


@dataclass(frozen=True)
class PlanReport:
    """A plan with its estimates, the same on every process; one of them prints it."""

    is_main_process: bool
    estimates: tuple[SettingEstimate, ...]
    whole_s: float | None  #: estimated time of the settings that are still to be measured; None where it is not known
    text: str
    num_broken_rows: int = 0  #: rows of the data file, drawn or not, that cannot be used

    @property
    def exit_code(self) -> int:
        """0: the run can be made; 3: it can, and rows of the data file cannot be used. The main process alone says so,
        as in a run.
        """
        return EXIT_CODE_FAILED_SAMPLES if self.is_main_process and self.num_broken_rows else 0


def describe_plan(config: ProfilingConfig) -> PlanReport:
    """The settings in order, each with estimated time and memory where there is something to go by, and the whole.

    Raises:
        ConfigurationError: what would also stop the run, or none of the samples can be read.
    """
    if config.model.tensor_parallel is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError("--dry_run with --tensor_parallel plans in one process; leave torchrun out")
    requested = requested_run(config)
    source, task, drawn = requested.source, requested.task, requested.drawn
    accelerator = setup_distributed(config.machine)
    device, here = (
        choose_device(config.machine.device, accelerator.local_process_index),
        processes_on_this_machine(accelerator),
    )
    set_cpu_threads(config.machine.num_threads, here)
    requested = loads_decided(requested, device, here)
    dtype = choose_dtype(config.model.precision, device)
    limit = max_new_tokens_of(config.task, task)
    planned = source.planned_requests(task, drawn.sample_ids, limit)
    ledger = Ledger(config.machine.output_dir, agreed_fingerprint(requested, accelerator))
    earlier = earlier_results(config.machine.output_dir, config.model, source, task, device, dtype)
    output_tokens = limit if earlier.output_tokens is None else earlier.output_tokens
    refuse_unfilled_batches(requested, accelerator.num_processes)
    size = plan_size(config, len(drawn), accelerator.num_processes)
    has_rough = source.is_near_matmul and earlier.rates is None
    matmul_rate = matmul_flops_per_second(device, dtype) if has_rough else None
    weights_bytes = planned.weight_elements * dtype.itemsize
    weights, estimates = weights_of_copies(requested, device), []
    for setting in requested.settings:
        request = planned.at(setting)
        is_done = ledger.result(setting.key) is not None
        of_copy, element_bytes = weights.get(loading_of(setting), (weights_bytes, dtype.itemsize))
        batch = batch_size_of(setting)
        memory_bytes = None if request.elements is None else of_copy + batch * request.elements * element_bytes
        work = SettingWork(setting.key, request.prompt_tokens, request.flops, memory_bytes, is_done, batch)
        estimates.append(estimate_setting(work, size, earlier, output_tokens, matmul_rate))
    due = [estimate.work.key for estimate in estimates if not estimate.work.is_done]
    faults, metric = broken_rows(task, range(len(task))), get_metric(task.metric)
    where = f"{device.type} {str(dtype).removeprefix('torch.')}; no weights were loaded"
    if source.is_served:
        where = f"{ASKED_AT}{source.place}; nothing was sent"
    lines = [
        f"plan: {counted(len(requested.grid), 'setting')} by {config.knobs.sampling_strategy}"
        f"{_reference_words(requested)}, {source.name} on "
        f"{task.name} {task.split}, {where}",
        *left_out_by(config, source, requested.grid),
        size_sentence(size),
        *plan_table(estimates),
        plan_total(estimates),
        *answered_lines(estimates, size, None if source.is_served else config.measuring.accuracy_batch_size),
        *shared_memory_lines(
            size.num_sharing, weights_bytes, planned.elements_of_each(size.num_sharing) * dtype.itemsize
        ),
        *[f"warning: {line}" for line in planned.memory_lines(config.model, device)],
        *source_sentences(estimates, earlier, output_tokens, matmul_rate, planned.no_formula),
        f"tokens: prompts of the first {counted(planned.num_samples, 'sample')} that can be read",
        *vision_lines(planned, requested.settings, reference_setting(source.limits)),
        *([] if config.model.random_weights else source.decoding_preferences().lines(source.name)),
        *prompt_lines(planned.final_prompt(requested.settings[0]), requested.prompt_form),
        *untried_sentences(source),
        *(f"warning: {line}" for line in unusable_lines(planned, requested.settings, reference_setting(source.limits))),
        *broken_rows_lines(faults, len(task)),
        *data_remarks(task),
        *[f"warning: {line}" for line in replaced_results_lines(requested, ledger, due)],
        *knob_lines(requested),
        *energy_plan_lines(
            config.measuring.energy, config.machine.device, accelerator.local_process_index, source=source
        ),
        *["at most: --until_precision may end the rounds before the last sample"]
        * (config.measuring.until_precision is not None),
        *power_sentences(
            len(requested.settings),
            len(drawn),
            size.timed if size.request_rate is None else None,
            sweep_noise(earlier.by_key),
            config.machine.detect,
            metric.best,
            score_name((metric.name, metric.best)),
        ),
    ]
    return PlanReport(
        accelerator.is_main_process, tuple(estimates), due_seconds(estimates), "\n".join(lines), len(faults)
    )


def weights_of_copies(requested: RequestedRun, device: torch.device) -> dict[Loading, tuple[int, int]]:
    """The bytes of the weights of each copy of the model, and of a number in its cache; none of a server."""
    found = {}
    for loading in requested.loadings:
        source = requested.source_of(loading)
        if isinstance(source, CheckpointSource):
            sizes, how = source.memory_of(config_of_copy(requested.config.model, loading), device)
            found[loading] = (how.weights_bytes(sizes), how.dtype.itemsize)
    return found


def _reference_words(requested: RequestedRun) -> str:
    again = ", which is measured again as a placebo" if requested.placebo is not None else ""
    if requested.beside is not None:
        return f" and the reference {requested.beside.key}{again}"
    own = reference_setting(requested.source.limits).key
    return f" with the reference {own} among them{again}" if own in requested.keys else ""


def prompt_lines(final: FinalPrompt | None, form: Mapping[str, Any]) -> list[str]:
    """What the model is given of the first sample that can be used, a line for the text and one for the ids."""
    if final is None:
        return ["prompt: none of the samples read can be used"]
    words = ", ".join(f"{name} {form[name]}" for name in ("family", "chat_template") if name in form)
    return final.lines(words or "family molmo")


def untried_sentences(source: ModelSource) -> list[str]:
    """The line, if any, that says that what the knobs allow is known only of the loaded model."""
    reason = source.limits.untried_reason
    return [] if reason is None else [f"knobs: whether they can be set shows once the model is loaded ({reason})"]


def earlier_results(
    folder: Path, config: ModelConfig, source: ModelSource, task: Task, device: torch.device, dtype: torch.dtype
) -> EarlierResults:
    """What results of the same model, hardware and precision in the output folder say; empty where there are none."""
    found = list(read_results(folder).values()) if folder.is_dir() and any(folder.glob(RESULT_FILES)) else []
    same = [result for result in found if is_comparable(result.provenance, config, source, device, dtype)]
    of_task = {
        setting_key(result): result
        for result in same
        if (result.provenance.task.name, result.provenance.task.split) == (task.name, task.split)
    }
    lengths = [result.aggregate_stats["output_tokens_mean"] or 0.0 for result in of_task.values()]
    return EarlierResults(of_task, rates_of(same), statistics.fmean(lengths) if lengths else None, len(same))


def is_comparable(
    provenance: Provenance,
    config: ModelConfig,
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Whether times of that run are times of this one: model, precision, what was requested, hardware; of a server's
    model the address, in place of what it does not show.
    """
    asked = provenance.experimental_variables
    if (asked.endpoint, asked.request_rate) != (shown_endpoints(config.endpoint), config.request_rate):
        return False
    if config.endpoint is not None:
        return provenance.model.name == source.name
    model, there, here = provenance.model, provenance.hardware, describe_hardware(device)
    same_hardware = (
        there.gpu_name == here.gpu_name is not None
        if device.type == "cuda"
        else there.device == "cpu" and (there.cpu, there.torch_threads) == (here.cpu, here.torch_threads)
    )
    same_model = model.name == source.name and model.dtype == str(dtype).removeprefix("torch.")
    implementations = (
        (config.attn_implementation, model.attn_implementation),
        (config.experts_implementation, model.experts_implementation),
    )
    is_same = same_hardware and same_model and config.execution == model.execution_asked
    return is_same and all(requested in (None, used) for requested, used in implementations)
