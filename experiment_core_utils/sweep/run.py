"""A knob run: each setting measured, merged, scored and saved before the next."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from experiment_core_utils.b_model_loader import load_staged_model
from experiment_core_utils.c_prompt_processing import choose_latency_ids, picture_caveats
from experiment_core_utils.f_experiment_info import caveats_of, gather_provenance, variables_of
from experiment_core_utils.g_metrics_inference import summarise, summarise_accuracy
from experiment_core_utils.h_metrics_compute import setting_compute
from experiment_core_utils.i_metrics_energy import energy_caveats, energy_of
from experiment_core_utils.j_results_saving import save_setting_result, setting_file_name, setting_result
from experiment_core_utils.k_results_aggregation import collect_parts, merge_parts
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.primitives.device import choose_device, release_cached_memory, set_cpu_threads
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.caveats import Caveat, caveat_fields
from experiment_core_utils.records.journal import remove_journals
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger
from experiment_core_utils.records.setting_result import Provenance, SettingResult, TaskDescription
from experiment_core_utils.records.settings import MeasuredSetting, SettingFailure
from experiment_core_utils.sweep.batches import Bench, batching_caveats
from experiment_core_utils.sweep.drift import ControlRuns, DriftCheck, fill_in_drift, wait_for_last_readings
from experiment_core_utils.sweep.front_search import SearchRules, random_order
from experiment_core_utils.sweep.measurer import RunContext, ShardMeasurer, split_by
from experiment_core_utils.sweep.plan import RequestedRun, block_choice_of, max_new_tokens_of, refuse_other_engines
from experiment_core_utils.sweep.profiles import TorchProfiles
from experiment_core_utils.sweep.requests import RequestSource, num_preparation_workers, request_budget_bytes
from experiment_core_utils.sweep.search_rounds import (
    SEARCH_FILE,
    FrontSearch,
    announce_end,
    search_content,
    wait_until_all_are_over,
)
from experiment_core_utils.sweep.steadiness import conditions_caveats, discarded_caveats, steadiness_part
from experiment_core_utils.tasks.interface import answer_of
from experiment_core_utils.tasks.registry import get_metric
from experiment_core_utils.tasks.sampling import few_samples_caveats, shards_of


def context_of(requested: RequestedRun, accelerator: Accelerator, ledger: Ledger, experiment_id: str) -> RunContext:
    """The place of this process in the run."""
    shards = shards_of(requested.drawn.sample_ids, accelerator.num_processes)
    journals = requested.config.machine.output_dir / PARTS_FOLDER
    return RunContext(experiment_id, accelerator.process_index, shards, ledger, journals, StopRequest())


def load_bench(requested: RequestedRun, context: RunContext, accelerator: Accelerator, processes_here: int) -> Bench:
    """Load the model, and say where its requests come from. A collective call.

    Raises:
        WorkerLost, ConfigurationError: as `refuse_other_engines`.
    """
    config, task = requested.config, requested.task
    device = choose_device(config.machine.device, accelerator.local_process_index)
    set_cpu_threads(config.machine.num_threads, processes_here)
    if context.is_main:
        print(f"loading {requested.source.name} on {device} ...", file=sys.stderr, flush=True)
    model = load_staged_model(config.model, requested.source, device, is_profiled=config.measuring.profiler is not None)
    engines = model.describe()["execution_stages"]
    refuse_other_engines(engines, context.ledger, requested.keys, context.journals, accelerator)
    latency_ids = choose_latency_ids(requested.drawn.sample_ids, config.measuring.num_latency_samples, config.task.seed)
    taken = [each for part in split_by(latency_ids, context.own_ids) for each in part]
    requests = RequestSource(
        task,
        model,
        taken,
        request_budget_bytes(config.machine.request_cache_gb, processes_here),
        num_preparation_workers(device, len(os.sched_getaffinity(0)) // processes_here),
        config.measuring.sample_timeout,
        keep_pictures=len(config.knobs.vision_targets) > 1,
    )
    return Bench(model, requests, max_new_tokens_of(config.task, task), get_metric(task.metric), latency_ids, engines)


class ProfilingRun:
    """One process's work on a run: its shard of the samples, at every setting that is due.

    Args:
        provenance: what holds for all settings; each adds its own.
        control: the setting that is measured again along the run; None for none.
        energy: measures energy; None where it is not requested.
    """

    def __init__(
        self,
        requested: RequestedRun,
        context: RunContext,
        bench: Bench,
        provenance: Provenance,
        control: KnobSetting | None = None,
        energy: StageMeasurement | None = None,
    ) -> None:
        self.requested, self.config = requested, requested.config
        self.context, self.ledger = context, context.ledger
        self.bench, self.model, self.requests, self.metric = bench, bench.model, bench.requests, bench.metric
        self.provenance = provenance
        profiles = TorchProfiles(
            self.config.machine.output_dir,
            self.config.measuring.profiler,
            self.config.measuring.use_profiler_on_all_samples,
            context.is_main,
            requested.keys,
            requested.drawn.sample_ids,
        )
        self.measurer = ShardMeasurer(self.config.measuring, context, bench, profiles, energy=energy)
        # A search measures its settings again in every round, and has no control setting beside them.
        self.drift = None if control is None or self.config.search.pareto_search else self._drift_check(control)

    def measure_all(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Measure, merge and save each setting before the next; returns those that failed.

        Raises:
            Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
        """
        failed = {}
        with (
            self.requests,
            signals_stop(self.context.stop),
            Progress(len(settings), len(self.context.own_ids), shown=self.context.is_main) as progress,
        ):
            try:
                if self.drift is not None:
                    with progress.step("warming up, measuring the control setting"):
                        self.drift.begin()
                for place, setting in enumerate(settings):
                    self.context.stop.raise_if_requested()
                    done = self.measurer.measure_shard(setting, progress, settings[place + 1 :])
                    if self.drift is not None:
                        self.drift.after(is_last=setting == settings[-1])
                    failure = self._merge_and_save(setting) if self.context.is_main else done.failure
                    if failure is not None:
                        failed[setting.key] = failure
                    if self.config.machine.enable_memory_optimization:
                        release_cached_memory(self.model.device)
                if self.context.is_main and self.drift is not None and self.config.measuring.drift_check_every:
                    wait_for_last_readings(
                        self.config.machine.output_dir,
                        range(1, self.context.num_processes),
                        self.context.experiment_id,
                        self.config.machine.worker_timeout,
                        self.context.stop,
                    )
            finally:
                if self.context.is_main:
                    fill_in_drift(self.config.machine.output_dir, self.ledger, [setting.key for setting in settings])
        return failed

    def _drift_check(self, control: KnobSetting) -> DriftCheck:
        return DriftCheck(
            self.config.machine.output_dir,
            self.context,
            control.key,
            self.config.measuring.drift_check_every,
            ControlRuns(self.config.measuring, self.context, self.bench, control),
        )

    def search_front(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Search the front, then save every setting that was measured and what was found; returns those that failed.

        Raises:
            As `measure_all`.
        """
        config, context = self.config, self.context
        rules = SearchRules(margin=config.search.pareto_margin, alpha=config.search.pareto_alpha, best=self.metric.best)
        order = random_order(self.requested.drawn.sample_ids, config.task.seed)
        search = FrontSearch(
            config.measuring, config.machine, context, self.bench, self.measurer, settings, order, rules
        )
        with self.requests, signals_stop(context.stop):
            result = search.run()
        announce_end(context.journals, context.rank, context.experiment_id)
        if context.is_main:
            files = {}
            for setting in settings:
                if setting.key in search.failures:
                    self.ledger.mark_failed(setting.key, search.failures[setting.key])
                else:
                    files[setting.key] = self._save(setting, search.measured[setting.key])
            content = search_content(result, rules, context.fingerprint, files, search.failures)
            write_json_atomically(content, config.machine.output_dir / SEARCH_FILE)
            is_over = wait_until_all_are_over(
                context.journals,
                context.num_processes,
                context.experiment_id,
                config.machine.worker_timeout,
                context.stop,
            )
            if is_over and not search.failures:
                # Not before: the journals are what a stopped search resumes from, and what other processes look at.
                for setting in settings:
                    remove_journals(context.journals, setting.key)
        return search.failures

    def _merge_and_save(self, setting: KnobSetting) -> SettingFailure | None:
        """Main process only: wait for all shards, pool them, score and compute, save, remember."""
        context = self.context
        shared = context.shared_setting(setting.key, context.shards)
        parts = collect_parts(shared, self.config.machine.worker_timeout, context.stop)
        merged = merge_parts(parts, self.requested.drawn.sample_ids)
        if merged.failure is not None:
            # Its journals stay: tried again by a later run, it resumes after the samples that did run.
            self.ledger.mark_failed(setting.key, merged.failure)
            return merged.failure
        failure = failure_where_no_sample_ran(merged, self.config.measuring.max_config_retries + 1)
        if failure is not None:
            self.ledger.mark_failed(setting.key, failure)
        else:
            self._save(setting, merged)
        remove_journals(context.journals, setting.key)
        return failure

    def _save(self, setting: KnobSetting, merged: MeasuredSetting) -> str:
        """Write the file of a setting and remember it; returns its name."""
        result = self._result(setting, merged)
        name = setting_file_name(self.requested.task.name, setting, merged.samples)
        save_setting_result(result, self.config.machine.output_dir / name)
        self.ledger.mark_done(setting.key, name)
        self.ledger.remove_others(name)
        return name

    def _result(self, setting: KnobSetting, merged: MeasuredSetting) -> SettingResult:
        """Score the whole run, then everything that follows from it."""
        answers = [answer_of(sample) for sample in merged.samples]
        scoring = self.metric.score(answers)
        accuracy = summarise_accuracy(answers, scoring, self.metric)
        summary = summarise(merged.samples, accuracy, len(merged.failures))
        compute = setting_compute(setting, merged, self.model, self.provenance.model.dtype)
        is_search = self.config.search.pareto_search
        steadiness = steadiness_part(
            setting.key, self.requested.order, self.config.measuring.until_precision, merged, is_search=is_search
        )
        own_caveats = conditions_caveats(steadiness.conditions) + discarded_caveats(merged.samples)
        own_caveats += energy_caveats(energy_of(merged.energy))
        if is_search:
            own_caveats += few_samples_caveats(len(self.requested.settings), len(merged.samples))
        provenance = self.provenance.with_keys(
            preparation=self.requests.describe(),
            experiment_ids=list(merged.experiment_ids),
        ).with_caveats(own_caveats)
        return setting_result(
            setting,
            self.model.num_total_blocks,
            merged,
            scoring.scores,
            summary,
            self.requested.drawn,
            compute,
            steadiness,
            self.drift.unfilled() if self.drift is not None else [],
            provenance,
        )


def failure_where_no_sample_ran(merged: MeasuredSetting, attempts: int) -> SettingFailure | None:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return None
    first = merged.failures[0]
    reason = f"all {len(merged.failures)} samples failed, the first with: {first.reason}"
    return SettingFailure(first.error, reason, attempts)


def provenance_of_run(
    requested: RequestedRun,
    accelerator: Accelerator,
    device: torch.device,
    processes_here: int,
    experiment_id: str,
    described: Mapping[str, Any],
) -> Provenance:
    """Who measured what with what, and the caveats that hold for all settings; a setting adds its own.

    Args:
        processes_here: processes of the run on this machine.
        described: what the loaded model says of itself.
    """
    config, source, task = requested.config, requested.source, requested.task
    choice = block_choice_of(config.knobs, config.model.random_weights, source.folder)
    caveats = [
        *caveats_of(config.model.random_weights, device, processes_here, task.source),
        *picture_caveats(task, requested.drawn.sample_ids, source.takes_pictures),
        *batching_caveats(len(requested.drawn), config.measuring.num_latency_samples, described["dtype"]),
        *run_few_samples_caveats(requested),
    ]
    return Provenance.model_validate(
        {
            **gather_provenance(accelerator, device, experiment_id),
            "model": {"name": source.name, "revision": source.revision, **described},
            "task": TaskDescription(
                name=task.name,
                split=task.split,
                metric=task.metric,
                max_new_tokens=task.max_new_tokens,
                source=dict(task.source),
                prompt_form=dict(getattr(task, "prompt_form", {})) or None,
            ),
            "experimental_variables": variables_of(config, max_new_tokens_of(config.task, task), choice),
            **caveat_fields(caveats),
        }
    )


def run_few_samples_caveats(requested: RequestedRun) -> list[Caveat]:
    """Caveats of few samples, for a whole run; in a search each setting has a number of samples, and so a caveat, of
    its own.
    """
    if requested.config.search.pareto_search:
        return []
    return few_samples_caveats(len(requested.settings), len(requested.drawn))
