"""A knob run before its first setting: its place, its model with the requests, and what holds for all results."""

import atexit
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import leave_process_group
from experiment_core_utils.b_model_loader import find_requested_checkpoint, load_staged_model
from experiment_core_utils.config.parts import EnergyMode, ModelConfig
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.d_energy_tracking import energy_gpus
from experiment_core_utils.f_experiment_info import (
    batching_caveats,
    caveats_of,
    gather_provenance,
    picture_caveats,
    variables_of,
)
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.measuring.batches import Bench, untimed_line
from experiment_core_utils.measuring.execution import settle_execution
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.profiles import TorchProfiles
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.common.placement import placement_caveats
from experiment_core_utils.models.common.preferences import decoding_caveats
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.slow_functions import slow_functions_caveats
from experiment_core_utils.models.hf.tensor_parallel import END, LOAD, LeadingModel, follow
from experiment_core_utils.models.interface import Concurrent, Inspectable, Runnable, Stepwise, answers_in_batches
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.planning.fingerprint import refuse_other_engines
from experiment_core_utils.planning.plan import RequestedRun, chosen_blocks, max_new_tokens_of, num_timed, stops_of
from experiment_core_utils.primitives.collectives import other_pids
from experiment_core_utils.primitives.cpu_threads import available_cpus
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    SampleError,
    WorkerLost,
    library_faults_named,
)
from experiment_core_utils.primitives.in_step import Crew, join_crew
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import WaitingLines, announced
from experiment_core_utils.primitives.texts import all_of
from experiment_core_utils.records.caveats import Caveat, caveat, caveat_fields
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.records.provenance import ASKED_AT, FinalPrompt, Model, Provenance, TaskDescription
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import MeasuredSetting, SettingFailure
from experiment_core_utils.requests.request_source import RequestSource, num_preparation_workers, request_budget_bytes
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiment_core_utils.tasks.registry import get_metric
from experiment_core_utils.tasks.sampling import choose_latency_ids, few_samples_caveats, shards_of, split_by


def crew_of(config: ProfilingConfig) -> Crew | None:
    """The processes that share one model, met; None where each process has its own. A collective call.

    Raises:
        ConfigurationError: another number of processes was launched.
    """
    size = config.model.tensor_parallel
    if size is None:
        return None
    device = choose_device(config.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    launcher = f"launch torchrun --nproc-per-node={size} -m knob_profiler profile"
    return join_crew(size, device, config.machine.worker_timeout, launcher)


def follow_run(config: ProfilingConfig, crew: Crew) -> None:
    """Load the model when the first process does, and make its calls until the run ends."""
    atexit.register(leave_process_group)
    if crew.hear() != LOAD:
        return
    source = find_requested_checkpoint(config)
    device = choose_device(config.machine.device, int(os.environ.get("LOCAL_RANK", "0")))
    set_cpu_threads(config.machine.num_threads, crew.size)
    model = load_staged_model(config.model, source, device)
    assert isinstance(model, TransformersModel)
    follow(model, crew)


@contextmanager
def leading(crew: Crew | None) -> Iterator[None]:
    """A context at whose end the others, if there are any, end too."""
    try:
        yield
    finally:
        if crew is not None:
            # One that is lost has ended, and the run's own error says more.
            with suppress(WorkerLost):
                crew.tell(END)


def context_of(
    requested: RequestedRun, accelerator: Accelerator, ledger: Ledger, experiment_id: str, run_uid: str | None = None
) -> RunContext:
    """The place of this process in the run. A collective call."""
    shards, pids = shards_of(requested.sample_ids, accelerator.num_processes), other_pids(accelerator)
    rank, journals = accelerator.process_index, requested.journals
    return RunContext(experiment_id, rank, shards, ledger, journals, StopRequest(), pids, run_uid)


def load_bench(
    requested: RequestedRun,
    context: RunContext,
    accelerator: Accelerator,
    processes_here: int,
    settings: Sequence[Setting],
) -> Bench:
    """Load the model and make it ready as `bench_of` does. A collective call.

    Raises:
        ConfigurationError: several processes would ask one server, each while the others are timed.
    """
    config = requested.config
    if requested.source.is_served and accelerator.num_processes > 1:
        raise ConfigurationError(
            f"--endpoint is measured by one process, and {accelerator.num_processes} were launched: run knobprof "
            "alone, with --concurrency for samples without times"
        )
    device = choose_device(config.machine.device, accelerator.local_process_index)
    crew = crew_of(config)
    set_cpu_threads(config.machine.num_threads, processes_here if crew is None else crew.size)
    if crew is not None:
        crew.tell(LOAD)
    source = requested.source
    work = f"connecting to {source.name} at {source.place}"
    with announced(work if source.is_served else f"loading {source.name} on {device}", shown=context.is_main):
        is_profiled = config.measuring.profiler is not None
        model = source.load(config.model, device, is_profiled=is_profiled)
    if crew is not None:
        assert isinstance(model, TransformersModel)
        model = LeadingModel(model, crew)
    return bench_of(model, requested, context, accelerator, processes_here, settings)


def bench_of(
    model: Runnable,
    requested: RequestedRun,
    context: RunContext,
    accelerator: Accelerator,
    processes_here: int,
    settings: Sequence[Setting],
) -> Bench:
    """Decide how the settings to measure run, and say where the model's requests come from. A collective call.

    Raises:
        WorkerLost, ConfigurationError: as `refuse_other_engines` and `refuse_settings_as_loaded`.
    """
    config, task = requested.config, requested.task
    if requested.source.limits.untried_reason is not None:
        refuse_settings_as_loaded(model, requested.settings)
    ids = requested.sample_ids
    latency_ids = choose_latency_ids(ids, num_timed(config, len(ids)), config.task.seed)
    taken = [each for part in split_by(latency_ids, context.own_ids) for each in part]
    requests = RequestSource(
        task,
        model,
        taken,
        request_budget_bytes(config.machine.request_cache_gb, processes_here),
        num_preparation_workers(model.device, available_cpus() // processes_here),
        config.measuring.sample_timeout,
        keep_pictures=len({vision_of(setting) for setting in requested.settings}) > 1,
        digests=requested.digests,
    )
    limit = max_new_tokens_of(config.task, task)
    model.end_answers_at(stops_of(config.task, task), config.task.ignore_eos)
    timeout = config.measuring.sample_timeout
    if isinstance(model, Concurrent):
        say = partial(print, file=sys.stderr, flush=True)
        model.while_waiting(WaitingLines(context.stop, say))
        for found in found_caches(model, task, latency_ids, limit):
            say(found)
    proofs = settle_execution(model, requests, tuple(settings), taken, limit, timeout, accelerator)
    engines = model.describe()["execution_stages"]
    refuse_other_engines(engines, context.ledger, requested.keys, context.journals, accelerator)
    answered, runs = len(ids) - len(latency_ids), config.measuring.num_runs_per_sample
    line = untimed_line(answered, len(latency_ids), runs, engines)
    if line is not None and accelerator.is_main_process:
        print(line, file=sys.stderr, flush=True)
    return Bench(model, requests, limit, get_metric(task.metric), latency_ids, engines, proofs)


# Samples that are asked with a salt and without at the start of a run.
_ASKED_BOTH_WAYS = 8


def found_caches(model: Runnable, task: Task, sample_ids: Iterable[int], limit: int) -> Sequence[str]:
    """What a server's cache is found to be by the first samples that it can be asked, a line for each server."""
    assert isinstance(model, Concurrent)
    inputs: list[Mapping[str, Any]] = []
    for sample_id in islice(sample_ids, 2 * _ASKED_BOTH_WAYS):
        with suppress(SampleError), library_faults_named(f"sample {sample_id}"):
            sample = task[sample_id]
            inputs.append(model.prepare(sample, prompt_for(task, sample, model.prompt_family), None).inputs)
    return model.find_caches(inputs[:_ASKED_BOTH_WAYS], limit) if inputs else ()


def refuse_settings_as_loaded(model: Runnable, settings: Sequence[Setting]) -> None:
    """Raises ConfigurationError where the loaded model cannot be set as planned; for models whose knobs could not be
    tried before.
    """
    if not isinstance(model, Inspectable):
        return
    for setting in settings:
        try:
            model.expected_experts(setting)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{setting.key} shows to be impossible now that {model.name} is loaded: {error}, by --top_k_list or "
                "--num_active_blocks_list"
            ) from error


class ProfilingRun:
    """One process's part of a run, ready to measure its shard of the samples at every setting that is due.

    Args:
        provenance: what holds for all settings; each adds its own.
        energy: measures energy; None where it is not requested.

    Raises:
        ConfigurationError: the profiler is requested of a model that does not run its stages one by one.
    """

    def __init__(
        self,
        requested: RequestedRun,
        context: RunContext,
        bench: Bench,
        provenance: Provenance,
        energy: StageMeasurement | None = None,
    ) -> None:
        self.requested, self.context, self.bench, self.provenance = requested, context, bench, provenance
        self.config = config = requested.config
        measuring, folder = config.measuring, config.machine.output_dir
        if measuring.profiler is not None and not isinstance(bench.model, Stepwise):
            raise ConfigurationError(
                f"--use_profiler needs stages that run one by one, which {bench.model.name} does not have; leave it out"
            )
        profiles = TorchProfiles(
            folder,
            measuring.profiler,
            measuring.use_profiler_on_all_samples,
            context.is_main,
            requested.keys,
            requested.sample_ids,
        )
        order = RoundOrder(requested.keys, config.task.seed)
        self.measurer = ShardMeasurer(measuring, context, bench, order, profiles, energy=energy)


def unseen_in_server_caveats(source: ModelSource, energy: EnergyMode, asked: ModelConfig) -> list[Caveat]:
    """What is absent from the results of a model that another process runs, with the reason, and how it was asked;
    nothing for others.
    """
    caveats = [] if energy == "off" else _energy_caveats(source)
    if source.is_served:
        caveats.append(caveat("server_unseen", place=source.place))
    if asked.concurrency > 1:
        caveats.append(caveat("server_concurrency", concurrency=asked.concurrency))
    if asked.request_rate is not None:
        caveats.append(caveat("open_loop", request_rate=asked.request_rate))
    return caveats


def _energy_caveats(source: ModelSource) -> list[Caveat]:
    """Why a model's energy is not measured, or of which GPUs it is; nothing for a model in this process."""
    try:
        gpus = energy_gpus(source)
    except MeterUnavailable as error:
        return [caveat("energy_not_measured", reason=str(error))]
    return [] if gpus is None else [caveat("server_gpus", gpus=gpus)]


def failure_where_no_sample_ran(merged: MeasuredSetting, attempts: int) -> SettingFailure | None:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return None
    first = merged.failures[0]
    reason = f"{all_of(len(merged.failures), 'sample')} failed, the first with: {first.reason}"
    return SettingFailure(first.error, reason, attempts)


def provenance_of_run(
    requested: RequestedRun,
    accelerator: Accelerator,
    device: torch.device,
    processes_here: int,
    experiment_id: str,
    described: Mapping[str, Any],
    final_prompt: FinalPrompt | None = None,
) -> Provenance:
    """Who measured what with what, and the caveats that hold for all settings; a setting adds its own.

    Args:
        processes_here: processes of the run on this machine.
        described: what the loaded model says of itself.
        final_prompt: what the model is given of the first sample.
    """
    config, source, task = requested.config, requested.source, requested.task
    origin = gather_provenance(accelerator, device, experiment_id)
    if source.is_served:
        origin["hardware"]["device"] = f"{ASKED_AT}{source.place}"
    choice = chosen_blocks(config, source)
    num_drawn, is_together = len(requested.drawn), answers_in_batches(described.get("execution_stages"))
    timed = num_timed(config, num_drawn)
    caveats = [
        *caveats_of(config.model.random_weights, device, processes_here, task.source),
        *placement_caveats(described.get("device_map")),
        *slow_functions_caveats(described.get("slow_functions"), device),
        *decoding_caveats((described.get("decoding") or {}).get("left_out") or {}),
        *unseen_in_server_caveats(source, config.measuring.energy, config.model),
        *picture_caveats(task, requested.sample_ids, source.takes_pictures),
        *(batching_caveats(num_drawn, timed, described.get("dtype")) if is_together else []),
        *few_samples_caveats(len(requested.settings), num_drawn),
    ]
    return Provenance.model_validate(
        {
            **origin,
            # What a backend does not say is None.
            "model": dict.fromkeys(Model.model_fields)
            | {"name": source.name, "revision": source.revision, **described}
            | {"execution_untimed": None if timed >= num_drawn else "batches" if is_together else "as timed"},
            "task": TaskDescription(
                name=task.name,
                split=task.split,
                metric=task.metric,
                max_new_tokens=task.max_new_tokens,
                source=dict(task.source),
                prompt_form=dict(requested.prompt_form) or None,
            ),
            "final_prompt": final_prompt,
            "experimental_variables": variables_of(config, max_new_tokens_of(config.task, task), choice),
            **caveat_fields(caveats),
        }
    )
