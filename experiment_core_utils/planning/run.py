"""A knob run before its first setting: its place, its model with the requests, and what holds for all results."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.a_distributed import crew_of
from experiment_core_utils.b_model_loader import load_requested
from experiment_core_utils.c_prompt_processing import first_final_prompt
from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.d_energy_tracking import agreed_meters
from experiment_core_utils.engines.likelihood import ScoringStages
from experiment_core_utils.facts.run_facts import facts_of_run
from experiment_core_utils.knobs.loading import loading_name, loading_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.measuring.batches import Bench, untimed_line
from experiment_core_utils.measuring.execution import settle_execution
from experiment_core_utils.measuring.measurer import ShardMeasurer
from experiment_core_utils.measuring.profiles import TorchProfiles
from experiment_core_utils.measuring.request_source import RequestSource, num_preparation_workers, request_budget_bytes
from experiment_core_utils.measuring.rounds import RoundOrder
from experiment_core_utils.meters.host_facts import facts_of_start
from experiment_core_utils.meters.requested_energy import energy_gpus
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.models.common.side_by_side import ModelsSideBySide
from experiment_core_utils.models.hf.tensor_parallel import LeadingModel
from experiment_core_utils.models.interface import Concurrent, Inspectable, Runnable, Stepwise
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.planning.fingerprint import refuse_other_engines
from experiment_core_utils.planning.plan import RequestedRun, max_new_tokens_of, num_timed, stops_of
from experiment_core_utils.primitives.collectives import check_folder_is_shared, other_pids, processes_on_this_machine
from experiment_core_utils.primitives.cpu_threads import available_cpus
from experiment_core_utils.primitives.device import choose_device, set_cpu_threads, usable_cores
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    MeterUnavailable,
    SampleError,
    library_faults_named,
)
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.progress import WaitingLines
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger
from experiment_core_utils.records.provenance import Provenance
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.prompt_forms import prompt_for
from experiment_core_utils.tasks.registry import get_metric, scored_by
from experiment_core_utils.tasks.sampling import choose_latency_ids, shards_of, split_by


def context_of(
    requested: RequestedRun, accelerator: Accelerator, ledger: Ledger, experiment_id: str, run_uid: str | None = None
) -> RunContext:
    """The place of this process in the run. A collective call."""
    shards, pids = shards_of(requested.sample_ids, accelerator.num_processes), other_pids(accelerator)
    rank, journals = accelerator.process_index, requested.journals
    return RunContext(experiment_id, rank, shards, ledger, journals, StopRequest(), pids, run_uid)


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
    if scored_by(task.metric) is not None and not isinstance(model, ScoringStages | LeadingModel):
        raise ConfigurationError(
            f"--metric {task.metric} needs stages that follow given tokens, which {model.name} lacks"
        )
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
    # Another loading may run by other engines.
    as_it_is = [each.key for each in requested.settings if requested.source.is_served or not loading_of(each)]
    refuse_other_engines(engines, context.ledger, as_it_is, context.journals, accelerator)
    answered, runs = len(ids) - len(latency_ids), config.measuring.num_runs_per_sample
    line = untimed_line(answered, len(latency_ids), runs, engines)
    if line is not None and accelerator.is_main_process:
        print(line, file=sys.stderr, flush=True)
    return Bench(model, requests, limit, get_metric(task.metric), latency_ids, engines, proofs)


FOLDER_SEEN_WITHIN_S = 90.0
_IN_ONE_PASS = "the modules alone score a text in one pass"
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
        gather_facts: gathers what holds for all settings, once; each setting adds its own.
        energy: measures energy; None where it is not requested.

    Raises:
        ConfigurationError: the profiler is requested of a model that does not run its stages one by one.
    """

    def __init__(
        self,
        requested: RequestedRun,
        context: RunContext,
        bench: Bench,
        gather_facts: Callable[[], Provenance],
        energy: StageMeasurement | None = None,
    ) -> None:
        self.requested, self.context, self.bench, self._gather_facts = requested, context, bench, gather_facts
        self.config = config = requested.config
        measuring = config.measuring
        if measuring.profiler is not None and not isinstance(bench.model, Stepwise):
            raise ConfigurationError(
                f"--use_profiler needs stages that run one by one, which {bench.model.name} does not have; leave it out"
            )
        profiles = TorchProfiles(
            config.machine.output_dir,
            measuring.profiler,
            measuring.use_profiler_on_all_samples,
            context.is_main,
            requested.keys,
            requested.sample_ids,
        )
        order = RoundOrder(requested.keys, config.task.seed)
        self.measurer = ShardMeasurer(measuring, context, bench, order, profiles, energy=energy)

    def gather_facts(self) -> None:
        """Note how requests were prepared and what a server's cache did so far, beside the facts that do not change."""
        preparation = self.bench.requests.describe()
        self.facts = self.provenance.with_keys(preparation=preparation)
        if isinstance(self.bench.model, Concurrent):
            self.facts = self.facts.with_caveats(self.bench.model.caveats)

    def facts_at(self, setting: Setting) -> Provenance:
        """The facts, with the model as it was loaded for a setting."""
        model = self.bench.model
        if not isinstance(model, ModelsSideBySide):
            return self.facts
        return self.facts.with_keys(model={**self.facts.model.content(), **model.described_at(setting)})

    @cached_property
    def provenance(self) -> Provenance:
        """Who measured what with what, and the caveats that hold for all settings."""
        return self._gather_facts()


def device_of_run(requested: RequestedRun, accelerator: Accelerator, processes_here: int) -> torch.device:
    """The device of this process, once its CPU threads are set.

    Raises:
        ConfigurationError: several processes would ask one server, each while the others are timed, or share the
            weights of several copies of the model.
    """
    loadings, sharing = requested.loadings, requested.config.model.tensor_parallel
    if len(loadings) > 1 and sharing is not None:
        raise ConfigurationError(
            f"{counted(len(loadings), 'model')} ({', '.join(map(loading_name, loadings))}) are compared by processes "
            f"that have whole ones, and those of --tensor_parallel {sharing} share one; drop it, or give one value"
        )
    if requested.source.is_served and accelerator.num_processes > 1:
        raise ConfigurationError(
            f"--endpoint is measured by one process, and {accelerator.num_processes} were launched: run knobprof "
            "alone, with --concurrency for samples without times"
        )
    config = requested.config
    set_cpu_threads(config.machine.num_threads, config.model.tensor_parallel or processes_here)
    return choose_device(config.machine.device, accelerator.local_process_index)


def check_folder_of(requested: RequestedRun, ledger: Ledger, experiment_id: str, accelerator: Accelerator) -> None:
    """Raises WorkerLost where a process does not see the folder of the others. A collective call."""
    machine = requested.config.machine
    marker, within_s = f"{ledger.fingerprint} {experiment_id}", min(FOLDER_SEEN_WITHIN_S, machine.worker_timeout / 2)
    check_folder_is_shared(machine.output_dir / PARTS_FOLDER, marker, within_s, accelerator)


def loaded_run(
    requested: RequestedRun,
    accelerator: Accelerator,
    ledger: Ledger,
    experiment_id: str,
    run_uid: str | None,
    settings: Sequence[Setting],
    energy: StageMeasurement | None,
) -> ProfilingRun:
    """Load the model, prepare its requests and open what measures energy; once for all settings that are due."""
    config, source, started = requested.config, requested.source, facts_of_start()
    check_folder_of(requested, ledger, experiment_id, accelerator)
    here = processes_on_this_machine(accelerator)
    context = context_of(requested, accelerator, ledger, experiment_id, run_uid)
    # Where energy is required, a meter that is not there is reported before the weights are read. Of a server that
    # loads at its first request its GPUs are not known before.
    is_required = config.measuring.energy == "required"
    meters = agreed_meters(config, source, energy, accelerator) if is_required else None
    on_device = device_of_run(requested, accelerator, here)
    crew = crew_of(config)
    at_once = requested.variants, requested.in_turn_reason is not None
    reason = _IN_ONE_PASS if scored_by(requested.task.metric) == "text" else None
    asked = config, source, settings, on_device, crew, *at_once
    model = load_requested(*asked, shown=context.is_main, modules_reason=reason)
    crops, timeout = vision_of(requested.settings[0]).bounds, config.measuring.sample_timeout
    first = first_final_prompt(requested.task, model, requested.sample_ids, crops, timeout)
    meters = meters or agreed_meters(config, source, energy, accelerator)
    has_energy = meters is not None or config.measuring.energy not in ("auto", "off")
    unseen = unseen_in_server_caveats(source, has_energy, config.model)
    if requested.in_turn_reason is not None:
        copies, loads = len(requested.loadings), config.measuring.num_runs_per_sample
        unseen.append(caveat("loads_in_turn", copies=copies, loads=loads))
    bench = bench_of(model, requested, context, accelerator, here, settings)
    at = requested, accelerator, model.device, here, experiment_id, model.describe(), first, started, unseen, run_uid
    # Now: a process that ends during the run has no cores to be asked for.
    cores = usable_cores(context.other_pids)
    gather_facts = partial(facts_of_run, *at, cores)
    return ProfilingRun(requested, context, bench, gather_facts, meters)


def unseen_in_server_caveats(source: ModelSource, has_energy: bool, asked: ModelConfig) -> list[Caveat]:
    """What is absent from the results of a model that another process runs, with the reason, and how it was asked;
    nothing for others.

    Args:
        has_energy: whether energy was requested, or is measured without that.
    """
    caveats = _energy_caveats(source) if has_energy else []
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
