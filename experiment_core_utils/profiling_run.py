"""In: all that a run needs, judged and found; out: its settings measured, merged, scored and saved, one by one."""

from collections.abc import Sequence, Set

from accelerate import Accelerator

from experiment_core_utils.a_distributed import processes_on_this_machine
from experiment_core_utils.asked_run import AskedRun
from experiment_core_utils.b_model_loader import load_staged_model
from experiment_core_utils.c_prompt_processing import (
    RequestMaker,
    choose_latency_ids,
    share_of_process,
)
from experiment_core_utils.drift import ControlRuns, DriftCheck, fill_in_drift
from experiment_core_utils.energy_entries import energy_caveats, energy_of
from experiment_core_utils.fingerprint import max_new_tokens_of, refuse_other_engines
from experiment_core_utils.g_metrics_inference import answer_of, summarise, summarise_accuracy
from experiment_core_utils.h_metrics_compute import setting_compute
from experiment_core_utils.j_results_saving import setting_file_name, setting_result
from experiment_core_utils.k_results_aggregation import (
    collect_parts,
    merge_parts,
    remove_journals,
)
from experiment_core_utils.measurement import ShareMeasurer, split_by
from experiment_core_utils.pareto_run import (
    SEARCH_FILE,
    FrontSearch,
    search_content,
    tell_over,
    wait_until_all_are_over,
)
from experiment_core_utils.pareto_search import SearchRules, random_order
from experiment_core_utils.primitives.device import choose_device, release_cached_memory, set_cpu_threads
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop
from experiment_core_utils.primitives.journal import JOURNAL_VERSION
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import JournalHeader, MeasuredSetting, SettingFailure
from experiment_core_utils.primitives.run_plan import PARTS_FOLDER
from experiment_core_utils.progress import Ledger
from experiment_core_utils.progress_bar import progress_of
from experiment_core_utils.request_source import request_source_for
from experiment_core_utils.run_provenance import provenance_of_run
from experiment_core_utils.setting_result import Preparation, SettingResult
from experiment_core_utils.stage_energy import StageMeasurement
from experiment_core_utils.steadiness import conditions_caveats, steadiness_part
from experiment_core_utils.tasks.registry import get_metric
from experiment_core_utils.tasks.sampling import few_samples_sentence
from experiment_core_utils.torch_profiles import TorchProfiles


class ProfilingRun:
    """One process's work on a run: its share of the samples, at every setting that is due."""

    def __init__(
        self,
        asked: AskedRun,
        accelerator: Accelerator,
        ledger: Ledger,
        experiment_id: str,
        control: KnobSetting | None = None,
        energy: StageMeasurement | None = None,
    ) -> None:
        config = asked.config
        self.asked, self.config = asked, config
        self.accelerator = accelerator
        self.ledger = ledger
        self.experiment_id = experiment_id
        self.metric = get_metric(asked.task.metric)
        self.stop = StopRequest()
        self.journals = config.output_dir / PARTS_FOLDER
        processes_here = processes_on_this_machine(accelerator)
        device = choose_device(config.device, accelerator.local_process_index)
        set_cpu_threads(config.num_threads, processes_here)
        self.model = load_staged_model(config, asked.source, device)
        self._described = self.model.describe()
        refuse_other_engines(self._described["execution_stages"], ledger, asked.keys, self.journals, accelerator)
        sample_ids, num_processes = asked.drawn.sample_ids, accelerator.num_processes
        self.shares = {rank: share_of_process(sample_ids, rank, num_processes) for rank in range(num_processes)}
        latency_ids = choose_latency_ids(sample_ids, config.num_latency_samples, config.seed)
        origin = self._origin()
        taken = [each for part in split_by(latency_ids, origin.sample_ids) for each in part]
        maker = RequestMaker(self.model, asked.task)
        self.requests = request_source_for(config, asked.task, maker, taken, device, processes_here)
        self.measurer = self._share_measurer(origin, latency_ids, energy)
        # A search measures its settings again in every round, and has no control setting beside them.
        self.drift = None if control is None or config.pareto_search else self._drift_check(control)
        self.provenance = provenance_of_run(asked, accelerator, device, processes_here, experiment_id, self._described)

    def measure_all(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Measure, merge and save each setting before the next; returns those that failed.

        Raises:
            Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
        """
        failed = {}
        own = len(self.shares[self.accelerator.process_index])
        with (
            self.requests,
            signals_stop(self.stop),
            progress_of(len(settings), own, shown=self.accelerator.is_main_process) as progress,
        ):
            try:
                if self.drift is not None:
                    self.drift.begin()
                for place, setting in enumerate(settings):
                    self.stop.raise_if_asked()
                    done = self.measurer.measure_share(setting, progress, settings[place + 1 :])
                    failure = self._merge_and_save(setting) if self.accelerator.is_main_process else done.failure
                    if failure is not None:
                        failed[setting.key] = failure
                    if self.drift is not None:
                        self.drift.after(is_last=setting == settings[-1])
                    if self.config.enable_memory_optimization:
                        release_cached_memory(self.model.device)
            finally:
                if self.accelerator.is_main_process:
                    fill_in_drift(self.config.output_dir, self.ledger, [setting.key for setting in settings])
        return failed

    def _share_measurer(
        self, origin: JournalHeader, latency_ids: Set[int], energy: StageMeasurement | None
    ) -> ShareMeasurer:
        config = self.config
        profiles = TorchProfiles(
            config.output_dir,
            config.profiler,
            config.use_profiler_on_all_samples,
            self.accelerator.is_main_process,
            self.asked.keys,
            self.asked.drawn.sample_ids,
        )
        return ShareMeasurer(
            config,
            self.metric,
            self.model,
            self.requests,
            max_new_tokens_of(config, self.asked.task),
            latency_ids,
            origin,
            self.journals,
            self.stop,
            profiles,
            energy=energy,
        )

    def _drift_check(self, control: KnobSetting) -> DriftCheck:
        return DriftCheck(
            self.config.output_dir,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.experiment_id,
            control.key,
            self.config.drift_check_every,
            ControlRuns(self.measurer, control),
        )

    def search_front(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Search the front, then save every setting that was measured and what was found; returns those that failed.

        Raises:
            As `measure_all`.
        """
        config = self.config
        rules = SearchRules(margin=config.pareto_margin, alpha=config.pareto_alpha, best=self.metric.best)
        order = random_order(self.asked.drawn.sample_ids, config.seed)
        search = FrontSearch(self.measurer, settings, order, rules)
        with self.requests, signals_stop(self.stop):
            result = search.run()
        tell_over(self.journals, self.accelerator.process_index, self.experiment_id)
        if self.accelerator.is_main_process:
            files = {}
            for setting in settings:
                if setting.key in search.failures:
                    self.ledger.mark_failed(setting.key, search.failures[setting.key])
                else:
                    files[setting.key] = self._save(setting, search.measured[setting.key])
            content = search_content(result, rules, self.ledger.fingerprint, files, search.failures)
            write_json_atomically(content, config.output_dir / SEARCH_FILE)
            is_over = wait_until_all_are_over(
                self.journals, self.accelerator.num_processes, self.experiment_id, config.worker_timeout, self.stop
            )
            if is_over and not search.failures:
                # Not before: the journals are what a stopped search goes on from, and what other processes look at.
                for setting in settings:
                    remove_journals(self.journals, setting.key)
        return search.failures

    def _origin(self) -> JournalHeader:
        rank = self.accelerator.process_index
        return JournalHeader(
            schema_version=JOURNAL_VERSION,
            key="",
            fingerprint=self.ledger.fingerprint,
            rank=rank,
            num_processes=self.accelerator.num_processes,
            experiment_id=self.experiment_id,
            sample_ids=self.shares[rank],
            engines=self._described["execution_stages"],
        )

    def _merge_and_save(self, setting: KnobSetting) -> SettingFailure | None:
        """Main process only: wait for all shares, pool them, score and compute, save, remember."""
        parts = collect_parts(
            self.journals,
            setting.key,
            self.ledger.fingerprint,
            self.experiment_id,
            self.shares,
            self.config.worker_timeout,
            self.stop,
        )
        merged = merge_parts(parts, self.asked.drawn.sample_ids)
        if merged.failure is not None:
            # Its journals stay: tried again by a later run, it goes on behind the samples that did run.
            self.ledger.mark_failed(setting.key, merged.failure)
            return merged.failure
        failure = failure_where_no_sample_ran(merged, self.config.max_config_retries + 1)
        if failure is not None:
            self.ledger.mark_failed(setting.key, failure)
        else:
            self._save(setting, merged)
        remove_journals(self.journals, setting.key)
        return failure

    def _save(self, setting: KnobSetting, merged: MeasuredSetting) -> str:
        """Write the file of a setting and remember it; returns its name."""
        result = self._result(setting, merged)
        name = setting_file_name(self.asked.task.name, setting, merged.samples)
        write_json_atomically(result.content(), self.config.output_dir / name)
        self.ledger.mark_done(setting.key, name)
        return name

    def _result(self, setting: KnobSetting, merged: MeasuredSetting) -> SettingResult:
        """Score the whole run, then everything that follows from it."""
        answers = [answer_of(sample) for sample in merged.samples]
        scoring = self.metric.score(answers)
        accuracy = summarise_accuracy(answers, scoring, self.metric)
        summary = summarise(merged.samples, accuracy, len(merged.failures))
        compute = setting_compute(setting, merged, self.model, self.provenance.model.dtype)
        is_search = self.config.pareto_search
        steadiness = steadiness_part(
            setting.key, self.asked.order, self.config.until_precision, merged, is_search=is_search
        )
        own_caveats = conditions_caveats(steadiness.conditions) + energy_caveats(energy_of(merged.energy))
        if is_search:
            few = few_samples_sentence(len(self.asked.settings), len(merged.samples))
            own_caveats += [few] if few is not None else []
        provenance = self.provenance.with_keys(
            preparation=Preparation(**self.requests.describe()),
            experiment_ids=list(merged.experiment_ids),
            caveats=[*self.provenance.caveats, *own_caveats],
        )
        return setting_result(
            setting,
            self.model.num_total_blocks,
            merged,
            scoring.scores,
            summary,
            self.asked.drawn,
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
