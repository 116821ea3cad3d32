"""The letters in order: from a configuration to one result file for each setting of the knobs, and a CSV of all."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import (
    check_folder_is_shared,
    generate_unique_id,
    of_main_process,
    outcome_of_all,
    processes_on_this_machine,
    setup_distributed,
)
from experiment_core_utils.accuracy_batches import batching_caveats
from experiment_core_utils.b_model_loader import ModelSource, find_model, load_staged_model
from experiment_core_utils.block_choice import block_choice_of
from experiment_core_utils.c_prompt_processing import (
    RequestMaker,
    choose_latency_ids,
    draw_samples,
    open_task,
    picture_caveats,
    share_of_process,
)
from experiment_core_utils.drift import ControlRuns, DriftCheck, with_drift
from experiment_core_utils.energy_entries import energy_caveats, energy_entry
from experiment_core_utils.f_experiment_info import caveats_of, gather_provenance, variables_of
from experiment_core_utils.fingerprint import agreed_fingerprint, max_new_tokens_of
from experiment_core_utils.g_metrics_inference import answer_of, summarise, summarise_accuracy
from experiment_core_utils.h_metrics_compute import setting_compute
from experiment_core_utils.j_results_saving import setting_file_name, setting_result
from experiment_core_utils.k_results_aggregation import (
    collect_parts,
    finished_ids,
    merge_parts,
    remove_journals,
    tidy_journals,
)
from experiment_core_utils.l_results_csv_cleaning import few_samples_sentence, write_settings_csv
from experiment_core_utils.measurement import ShareMeasurer, split_by
from experiment_core_utils.pareto_run import (
    SEARCH_FILE,
    FrontSearch,
    check_searchable,
    search_content,
    tell_over,
    wait_until_all_are_over,
)
from experiment_core_utils.pareto_search import SearchRules, random_order
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.device import choose_device, release_cached_memory, set_cpu_threads
from experiment_core_utils.primitives.errors import ConfigurationError, WorkerLost
from experiment_core_utils.primitives.files import remove_leftovers, write_json_atomically
from experiment_core_utils.primitives.interruption import StopRequest, signals_stop
from experiment_core_utils.primitives.journal import JOURNAL_VERSION, only_run_in
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import JournalHeader, MeasuredSetting, MeasuringOrder, SettingFailure
from experiment_core_utils.primitives.run_plan import PARTS_FOLDER, PLAN_VERSION, RunPlan, write_plan
from experiment_core_utils.primitives.stability import measuring_order
from experiment_core_utils.progress import Ledger
from experiment_core_utils.progress_bar import progress_of
from experiment_core_utils.request_source import request_source_for
from experiment_core_utils.setting_energy import check_energy, means_of
from experiment_core_utils.setting_plan import left_out_by, plan_for
from experiment_core_utils.stage_energy import StageMeasurement
from experiment_core_utils.steadiness import conditions_caveats, steadiness_entries
from experiment_core_utils.tasks.interface import Sample, Task
from experiment_core_utils.tasks.registry import get_metric
from experiment_core_utils.tasks.sampling import SampledDataset
from experiment_core_utils.torch_profiles import TorchProfiles

EXIT_CODE_FAILED_SAMPLES = 3
FOLDER_SEEN_WITHIN_S = 90.0


@dataclass(frozen=True)
class RunReport:
    """What a run leaves behind.

    Attributes:
        experiment_id: None where every setting was done already.
        results: contents of the settings' files, in the order of the plan; settings that failed are not among them.
        failed: settings that could not be run.
        left_out: for each knob of which the strategy measured fewer values than were given, those left out, as text.
        csv_path: the table of all settings; None where every setting failed, and on processes other than the main one.
        search: content of `pareto_search.json`; None where no front was searched, and on other processes.
    """

    experiment_id: str | None
    is_main_process: bool
    results: tuple[Mapping[str, Any], ...]
    failed: Mapping[str, SettingFailure]
    left_out: tuple[str, ...]
    output_dir: Path
    csv_path: Path | None
    search: Mapping[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """0: all measured; 1: settings failed; 3: all settings have results, but samples of them failed.

        Known to the main process only; the others give 0, or launchers would end the run because of them.
        """
        if not self.is_main_process:
            return 0
        if self.failed:
            return 1
        return EXIT_CODE_FAILED_SAMPLES if any(result["failed_samples"] for result in self.results) else 0


def run_profiling(config: ProfilingConfig, energy: StageMeasurement | None = None) -> RunReport:
    """Judge what was asked against model and task, load once, then measure and save setting by setting.

    Args:
        energy: what `--energy` measures with; None finds it on the machine.
    """
    source = find_model(config.model_path, config.hf_cache_dir)
    settings = plan_for(config, source)
    order = measuring_order([setting.key for setting in settings], config.setting_order, config.seed)
    task = open_task(config)
    drawn = draw_samples(task, config)
    if config.pareto_search:
        check_searchable(get_metric(task.metric), len(drawn))
    check_energy(config, energy)
    make_output_dir(config.output_dir)
    # Processes wait for each other here, until the model is loaded; later they meet in their journals only.
    accelerator = setup_distributed(config)
    fingerprint = agreed_fingerprint(config, source, task, drawn.sample_ids, accelerator)
    ledger = Ledger(config.output_dir, fingerprint)
    journals = config.output_dir / PARTS_FOLDER
    with ExitStack() as stack:
        of_main_process(lambda: stack.enter_context(only_run_in(journals)), accelerator)
        due_keys = of_main_process(lambda: due_and_tidy(config, order, ledger), accelerator)
        due = settings_of(due_keys, settings)
        experiment_id, failed = generate_unique_id(accelerator) if due else None, {}
        plan = plan_of(experiment_id, ledger, task, settings, due, len(drawn), accelerator.num_processes, journals)
        of_main_process(lambda: write_plan(plan, config.output_dir), accelerator)
        if experiment_id is not None:
            (control,) = settings_of(order.keys[:1], settings)
            within_s = min(FOLDER_SEEN_WITHIN_S, config.worker_timeout / 2)
            check_folder_is_shared(journals, f"{fingerprint} {experiment_id}", within_s, accelerator)
            caveats = few_samples_caveats(config, len(settings), len(drawn))
            means = outcome_of_all(lambda: means_of(config, accelerator.local_process_index, energy), accelerator)
            run = ProfilingRun(
                config,
                source,
                task,
                accelerator,
                drawn,
                fingerprint,
                ledger,
                experiment_id,
                caveats,
                order,
                control,
                means,
            )
            failed = run.search_front(due) if config.pareto_search else run.measure_all(due)
        if not accelerator.is_main_process:
            return RunReport(experiment_id, False, (), failed, (), config.output_dir, None)
        results = tuple(result for setting in settings if (result := ledger.result(setting.key)) is not None)
        csv_path = config.output_dir / f"{task.name.replace('_', '-')}_settings.csv" if results else None
        if csv_path is not None:
            write_settings_csv(results, csv_path)
    return RunReport(
        experiment_id,
        True,
        results,
        failed,
        left_out_by(config, source, settings),
        config.output_dir,
        csv_path,
        finished_search(config, [setting.key for setting in settings], ledger),
    )


def few_samples_caveats(config: ProfilingConfig, num_settings: int, num_drawn: int) -> list[str]:
    """Of a whole run; in a search each setting has a number of samples, and so a caveat, of its own."""
    sentence = None if config.pareto_search else few_samples_sentence(num_settings, num_drawn)
    return [] if sentence is None else [sentence]


def due_and_tidy(config: ProfilingConfig, order: MeasuringOrder, ledger: Ledger) -> tuple[str, ...]:
    """Keys of the settings that have no result yet, in `order`, once the files in the folder are put in order.

    A search is one piece of work: until it is finished all its settings are due, and their journals are kept.
    """
    remove_leftovers(config.output_dir)
    is_saved = {key: ledger.result(key) is not None for key in order.keys}
    if config.pareto_search:
        search = finished_search(config, order.keys, ledger)
        is_saved = dict.fromkeys(is_saved, search is not None and not search["failed"])
    tidy_journals(config.output_dir / PARTS_FOLDER, ledger.fingerprint, lambda key: is_saved.get(key, False))
    return tuple(key for key, saved in is_saved.items() if not saved)


def settings_of(keys: Sequence[str], plan: Sequence[KnobSetting]) -> list[KnobSetting]:
    """The settings that the main process wants measured, in its order.

    Raises:
        WorkerLost: this process was not given one of them.
    """
    by_key = {setting.key: setting for setting in plan}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise WorkerLost(f"this process was not given the setting {missing[0]}: all need the same arguments")
    return [by_key[key] for key in keys]


def plan_of(
    experiment_id: str | None,
    ledger: Ledger,
    task: Task,
    settings: Sequence[KnobSetting],
    due: Sequence[KnobSetting],
    num_samples: int,
    num_processes: int,
    journals: Path,
) -> RunPlan:
    """What this run sets out to do, for those who ask how far it has come."""
    before = [finished_ids(journals, setting.key, ledger.fingerprint) for setting in due]
    return RunPlan(
        schema_version=PLAN_VERSION,
        experiment_id=experiment_id,
        fingerprint=ledger.fingerprint,
        task=task.name,
        keys=tuple(setting.key for setting in settings),
        due=tuple(setting.key for setting in due),
        num_samples=num_samples,
        num_processes=num_processes,
        num_samples_before=sum(len(ids) for ids in before),
        started_unix_s=time.time(),
    )


def finished_search(config: ProfilingConfig, keys: Sequence[str], ledger: Ledger) -> Mapping[str, Any] | None:
    """The run's own `pareto_search.json`, None where there is none of these settings with all their results."""
    if not config.pareto_search:
        return None
    try:
        content = json.loads((config.output_dir / SEARCH_FILE).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("fingerprint") != ledger.fingerprint:
        return None
    searched = list(content["rounds"][0])
    have = all(key in content["failed"] or ledger.result(key) is not None for key in searched)
    return content if have and set(searched) == set(keys) else None


def make_output_dir(folder: Path) -> None:
    """Make the folder of the results; raises ConfigurationError where that, or writing into it, is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--output_dir {folder} cannot be written to ({error.strerror}); give another folder"
        ) from error


class ProfilingRun:
    """One process's work on a run: its share of the samples, at every setting that is due."""

    def __init__(
        self,
        config: ProfilingConfig,
        source: ModelSource,
        task: Task,
        accelerator: Accelerator,
        drawn: SampledDataset[Sample],
        fingerprint: str,
        ledger: Ledger,
        experiment_id: str,
        caveats: Sequence[str] = (),
        order: MeasuringOrder | None = None,
        control: KnobSetting | None = None,
        energy: StageMeasurement | None = None,
    ) -> None:
        self.config = config
        self.order = order if order is not None else MeasuringOrder("planned", None, ())
        self.task = task
        self.accelerator = accelerator
        self.drawn = drawn
        self.fingerprint = fingerprint
        self.ledger = ledger
        self.experiment_id = experiment_id
        self.metric = get_metric(task.metric)
        self.stop = StopRequest()
        self.journals = config.output_dir / PARTS_FOLDER
        processes_here = processes_on_this_machine(accelerator)
        device = choose_device(config.device, accelerator.local_process_index)
        set_cpu_threads(config.num_threads, processes_here)
        self.model = load_staged_model(config, source, device)
        self.shares = {
            rank: share_of_process(drawn.sample_ids, rank, accelerator.num_processes)
            for rank in range(accelerator.num_processes)
        }
        max_new_tokens = max_new_tokens_of(config, task)
        profiles = TorchProfiles(
            config.output_dir,
            config.profiler,
            config.use_profiler_on_all_samples,
            accelerator.is_main_process,
            [setting.key for setting in plan_for(config, source)],
            drawn.sample_ids,
        )
        origin = self._origin()
        latency_ids = choose_latency_ids(drawn.sample_ids, config.num_latency_samples, config.seed)
        taken = [each for part in split_by(latency_ids, origin.sample_ids) for each in part]
        self.requests = request_source_for(config, task, RequestMaker(self.model, task), taken, device, processes_here)
        self.measurer = ShareMeasurer(
            config,
            self.metric,
            self.model,
            self.requests,
            max_new_tokens,
            latency_ids,
            origin,
            self.journals,
            self.stop,
            profiles,
            energy=energy,
        )
        # A search measures its settings again in every round, and has no control setting beside them.
        self.drift = None if control is None or config.pareto_search else self._drift_check(control)
        model = {"name": source.name, "revision": source.revision, **self.model.describe()}
        self.provenance = {
            **gather_provenance(accelerator, device, experiment_id),
            "model": model,
            "task": {
                "name": task.name,
                "split": task.split,
                "metric": task.metric,
                "max_new_tokens": task.max_new_tokens,
                "source": dict(task.source),
            },
            "experimental_variables": variables_of(config, max_new_tokens, block_choice_of(config, source.folder)),
            "caveats": [
                *caveats_of(config, device, processes_here, task.source),
                *picture_caveats(task, drawn.sample_ids, source.takes_pictures),
                *batching_caveats(len(drawn), config.num_latency_samples, model["dtype"]),
                *caveats,
            ],
        }

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
            if self.drift is not None:
                self.drift.begin()
            for place, setting in enumerate(settings):
                self.stop.raise_if_asked()
                done = self.measurer.measure_share(setting, progress, settings[place + 1 :])
                failure = self._merge_and_save(setting) if self.accelerator.is_main_process else done.failure
                if failure is not None:
                    failed[setting.key] = failure
                if self.drift is not None:
                    self.drift.after(setting.key, is_last=setting == settings[-1])
                if self.config.enable_memory_optimization:
                    release_cached_memory(self.model.device)
        return failed

    def _drift_check(self, control: KnobSetting) -> DriftCheck:
        return DriftCheck(
            self.config.output_dir,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.experiment_id,
            control.key,
            self.config.drift_check_every,
            ControlRuns(self.measurer, control),
            self.ledger,
        )

    def search_front(self, settings: Sequence[KnobSetting]) -> dict[str, SettingFailure]:
        """Search the front, then save every setting that was measured and what was found; returns those that failed.

        Raises:
            As `measure_all`.
        """
        config = self.config
        rules = SearchRules(margin=config.pareto_margin, alpha=config.pareto_alpha, best=self.metric.best)
        order = random_order(self.drawn.sample_ids, config.seed)
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
            content = search_content(result, rules, self.fingerprint, files, search.failures)
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
            fingerprint=self.fingerprint,
            rank=rank,
            num_processes=self.accelerator.num_processes,
            experiment_id=self.experiment_id,
            sample_ids=self.shares[rank],
        )

    def _merge_and_save(self, setting: KnobSetting) -> SettingFailure | None:
        """Main process only: wait for all shares, pool them, score and compute, save, remember."""
        parts = collect_parts(
            self.journals,
            setting.key,
            self.fingerprint,
            self.experiment_id,
            self.shares,
            self.config.worker_timeout,
            self.stop,
        )
        merged = merge_parts(parts, self.drawn.sample_ids)
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
        name = setting_file_name(self.task.name, setting, merged.samples)
        write_json_atomically(result, self.config.output_dir / name)
        self.ledger.mark_done(setting.key, name)
        return name

    def _result(self, setting: KnobSetting, merged: MeasuredSetting) -> dict[str, Any]:
        """Score the whole run, then everything that follows from it."""
        answers = [answer_of(sample) for sample in merged.samples]
        scoring = self.metric.score(answers)
        accuracy = summarise_accuracy(answers, scoring, self.metric)
        summary = summarise(merged.samples, accuracy, len(merged.failures))
        blocks = self.model.num_total_blocks
        is_search = self.config.pareto_search
        steadiness = steadiness_entries(
            setting.key, self.order, self.config.until_precision, merged, is_search=is_search
        )
        own_caveats = conditions_caveats(steadiness["conditions"]) + energy_caveats(energy_entry(merged.energy))
        if is_search:
            few = few_samples_sentence(len(self.order.keys), len(merged.samples))
            own_caveats += [few] if few is not None else []
        provenance = {
            **self.provenance,
            "preparation": self.requests.describe(),
            "experiment_ids": list(merged.experiment_ids),
            "caveats": [*self.provenance["caveats"], *own_caveats],
        }
        result = setting_result(setting, blocks, merged, scoring.scores, summary, self.drawn, provenance)
        result |= setting_compute(setting, merged, self.model, self.provenance["model"]["dtype"])
        return with_drift(result | steadiness, self.drift.note(setting.key) if self.drift is not None else [])


def failure_where_no_sample_ran(merged: MeasuredSetting, attempts: int) -> SettingFailure | None:
    """A setting of which every sample failed is a failed setting, not a result without numbers."""
    if merged.samples or not merged.failures:
        return None
    first = merged.failures[0]
    reason = f"all {len(merged.failures)} samples failed, the first with: {first.reason}"
    return SettingFailure(first.error, reason, attempts)
