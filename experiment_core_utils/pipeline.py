"""The knob run: from a configuration to one result file for each setting, and a CSV of all.

By letters: a, b, c and f once; e in rounds, each sample at every setting, and d around them; then k, g, h, i and j for
each setting; l at the end.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from experiment_core_utils.a_distributed import ID_NAME, RESULTS, generate_unique_id, setup_distributed
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.d_energy_tracking import meters_of
from experiment_core_utils.f_experiment_info import crowded_cores_caveats
from experiment_core_utils.g_metrics_inference import summarise, summarise_accuracy
from experiment_core_utils.h_metrics_compute import setting_compute
from experiment_core_utils.i_metrics_energy import AnsweredRequest, energy_of, with_correct_answers
from experiment_core_utils.j_results_saving import save_setting_result, setting_result
from experiment_core_utils.k_results_aggregation import collect_parts, merge_parts, shared_setting
from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.knobs.vision_tokens import vision_of
from experiment_core_utils.l_results_csv_cleaning import write_tables
from experiment_core_utils.measuring.noted_caveats import alone_caveats, served_caveats
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.meters.steadiness import steadiness_part
from experiment_core_utils.models.interface import Concurrent
from experiment_core_utils.planning.fingerprint import agreed_fingerprint
from experiment_core_utils.planning.plan import RequestedRun, block_caveats, left_out_by, requested_run
from experiment_core_utils.planning.remarks import (
    broken_rows,
    broken_rows_lines,
    data_remarks,
    knob_lines,
    replaced_results_lines,
    resumed_lines,
    unusable_lines_of,
)
from experiment_core_utils.planning.run import (
    ProfilingRun,
    context_of,
    crew_of,
    failure_where_no_sample_ran,
    follow_run,
    leading,
    load_bench,
    provenance_of_run,
)
from experiment_core_utils.planning.tidying import (
    check_and_make_folder,
    due_keys,
    fill_in_places,
    plan_of,
    run_uid_of,
    settings_of,
    tidy_folder,
)
from experiment_core_utils.primitives.collectives import (
    all_or_raise,
    broadcast_from_main,
    check_folder_is_shared,
    processes_on_this_machine,
)
from experiment_core_utils.primitives.csv_tables import check_table_format
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import EXIT_CODE_FAILED_SAMPLES, Stopped, WorkerLost
from experiment_core_utils.primitives.files import state_folder
from experiment_core_utils.primitives.interruption import signals_stop
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.journal import LOCK_NAME, only_run_in, remove_journals
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, write_plan
from experiment_core_utils.records.locks import MainProcessWatch, RunLock
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.setting_result import SettingResult, setting_file_name
from experiment_core_utils.records.settings import MeasuredSetting, SettingFailure
from experiment_core_utils.requests.request_source import first_final_prompt
from experiment_core_utils.saved_results.eval_results import write_eval_results
from experiment_core_utils.saved_results.result_caveats import with_caveats
from experiment_core_utils.saved_results.trackers import check_tracker
from experiment_core_utils.tasks.interface import answer_of, scored

FOLDER_SEEN_WITHIN_S = 90.0
_POLL_S = 0.5
PUBLISHED_EVERY_S = 5.0


@dataclass(frozen=True)
class RunReport:
    """What a run leaves behind."""

    experiment_id: str | None  #: None where every setting was done already
    is_main_process: bool
    #: contents of the settings' files, in the order of the plan; settings that failed are not among them
    results: tuple[SettingResult, ...]
    failed: Mapping[str, SettingFailure]  #: settings that could not be run
    #: given values of knobs that are in no setting, a sentence each
    left_out: tuple[str, ...]
    output_dir: Path
    #: the table of all settings, with those of this fingerprint that earlier runs left in the folder; None where every
    #: setting failed, and on processes other than the main one
    csv_path: Path | None

    @property
    def exit_code(self) -> int:
        """0: all measured; 1: settings failed; 3: all settings have results, but samples of them failed.

        Known to the main process only; the others give 0, or launchers would end the run because of them.
        """
        if not self.is_main_process:
            return 0
        if self.failed:
            return 1
        return EXIT_CODE_FAILED_SAMPLES if any(result.failed_samples for result in self.results) else 0


def run_profiling(config: ProfilingConfig, energy: StageMeasurement | None = None) -> RunReport:
    """Find model and samples, plan, then measure in rounds and save what has no result yet, and tabulate.

    Args:
        energy: what `--energy` measures with; None finds it on the machine.
    """
    folder = config.machine.output_dir
    # Processes wait for each other here, until the model is loaded; later they meet in their journals only.
    if config.machine.tracker is not None:
        check_tracker(config.machine.tracker)
    check_table_format(config.machine.format)
    crew = crew_of(config)
    if crew is not None and crew.rank:
        follow_run(config, crew)
        return RunReport(None, False, (), {}, (), folder, None)
    with ExitStack() as stack:
        stack.enter_context(leading(crew))
        accelerator = setup_distributed(config.machine)
        requested = requested_run(config)
        check_and_make_folder(requested, energy)
        fingerprint = agreed_fingerprint(requested, accelerator)
        ledger = Ledger(folder, fingerprint)
        locks: list[RunLock] = []  # of the main process alone
        broadcast_from_main(lambda: locks.append(stack.enter_context(only_run_in(folder / PARTS_FOLDER))), accelerator)
        watch = None if locks else MainProcessWatch(folder / PARTS_FOLDER / LOCK_NAME, config.machine.worker_timeout)
        order = requested.order
        keys = broadcast_from_main(lambda: due_keys(order, ledger), accelerator)
        aside = broadcast_from_main(lambda: tidy_folder(folder, ledger, order.keys, keys), accelerator)
        broadcast_from_main(lambda: fill_in_places(requested, ledger), accelerator)
        due = settings_of(keys, requested.settings)
        left_out = left_out_by(config, requested.source, requested.grid)
        unusable = broadcast_from_main(lambda: unusable_lines_of(requested, due), accelerator)
        if accelerator.is_main_process:
            faults = broken_rows(requested.task, requested.sample_ids) if due else []
            broken = ["\n".join(broken_rows_lines(faults, len(requested.sample_ids)))] if faults else []
            for line in left_out:
                print(line, file=sys.stderr, flush=True)
            replaced = replaced_results_lines(requested, ledger, keys)
            for line in [*broken, *data_remarks(requested.task), *replaced, *unusable]:
                print(f"warning: {line}", file=sys.stderr, flush=True)
            for line in knob_lines(requested):
                print(line, file=sys.stderr, flush=True)
        id_file = state_folder(folder) / ID_NAME
        experiment_id, failed = generate_unique_id(accelerator, id_file, RESULTS) if due else None, {}
        run_uid = broadcast_from_main(lambda: run_uid_of(requested, ledger, due), accelerator) if due else None
        plan = plan_of(requested, experiment_id, ledger, due, accelerator.num_processes, run_uid)
        broadcast_from_main(lambda: write_plan(plan, folder), accelerator)
        for line in resumed_lines(plan, aside, folder) if accelerator.is_main_process else ():
            print(line, file=sys.stderr, flush=True)
        if experiment_id is not None:
            run = loaded_run(requested, accelerator, ledger, experiment_id, run_uid, due, energy)
            # Looked at before each sample and while waiting: no process goes on without the others or its folder.
            stack.enter_context(run.context.stop.watching(locks[0].refresh if watch is None else watch.check))
            failed = measure_settings(run, due)
            run.measurer.warn_of_refused_batches()
            if watch is not None:
                wait_for_main(run.context, watch)
        if not accelerator.is_main_process:
            return RunReport(experiment_id, False, (), failed, (), folder, None)
        results = tuple(result for key in requested.keys if (result := ledger.result(key)) is not None)
        # A run of fewer settings than the folder has results of does not shorten the tables.
        tabled = (*results, *ledger.results_beside(requested.keys))
        csv_path = write_tables(tabled, requested.task.name, folder, config.machine.format) if results else None
        write_eval_results(results, requested.task, folder)
        if experiment_id is not None:
            locks[0].announce_end(experiment_id)
    return RunReport(experiment_id, True, results, failed, left_out, folder, csv_path)


def loaded_run(
    requested: RequestedRun,
    accelerator: Accelerator,
    ledger: Ledger,
    experiment_id: str,
    run_uid: str | None,
    settings: Sequence[Setting],
    energy: StageMeasurement | None,
) -> ProfilingRun:
    """Find what measures energy, load the model and gather the facts; once for all settings that are due."""
    config = requested.config
    within_s = min(FOLDER_SEEN_WITHIN_S, config.machine.worker_timeout / 2)
    marker = f"{ledger.fingerprint} {experiment_id}"
    check_folder_is_shared(config.machine.output_dir / PARTS_FOLDER, marker, within_s, accelerator)

    mode, local_rank = config.measuring.energy, accelerator.local_process_index
    is_spread = config.model.device_map is not None or config.model.tensor_parallel is not None
    where, seed, source = (config.machine.device, local_rank), config.task.seed, requested.source

    def find_meters() -> StageMeasurement | None:
        # Of a server that loads at its first request its GPUs are not known before.
        return all_or_raise(
            lambda: meters_of(mode, *where, seed, energy, is_spread=is_spread, source=source), accelerator
        )

    # Where energy is required, a meter that is not there is reported before the weights are read.
    required = find_meters() if mode == "required" else None
    processes_here = processes_on_this_machine(accelerator)
    context = context_of(requested, accelerator, ledger, experiment_id, run_uid)
    bench = load_bench(requested, context, accelerator, processes_here, settings)
    model = bench.model
    first = first_final_prompt(
        requested.task,
        model,
        requested.sample_ids,
        vision_of(requested.settings[0]).bounds,
        config.measuring.sample_timeout,
    )
    provenance = provenance_of_run(
        requested, accelerator, model.device, processes_here, experiment_id, model.describe(), first
    ).with_keys(run_uid=run_uid)
    if isinstance(model, Concurrent):
        provenance = provenance.with_caveats(model.caveats)
    num_processes = config.model.tensor_parallel or processes_here
    provenance = provenance.with_caveats(crowded_cores_caveats(model.device, num_processes, context.other_pids))
    return ProfilingRun(requested, context, bench, provenance, required or find_meters())


def measure_settings(run: ProfilingRun, settings: Sequence[Setting]) -> dict[str, SettingFailure]:
    """Measure all settings in rounds; pool, summarise and save each. Returns those that failed.

    Raises:
        Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
    """
    context, failed = run.context, {}
    if context.is_main and not getattr(run.bench.metric, "runs_foreign_code", False):
        run.measurer.publish = Publisher(lambda: save_unfinished(run, settings))
    with (
        run.bench.requests,
        signals_stop(context.stop),
        # It prints: behind the bars, when these are closed.
        unfinished_saved(run, settings),
        Progress(1, len(settings) * len(context.own_ids), shown=context.is_main) as progress,
    ):
        context.stop.raise_if_requested()
        # d opens and closes the windows of energy, e runs what is measured; each sample goes to the journal.
        done = run.measurer.measure(dict.fromkeys(settings, context.own_ids), progress)
        for setting in settings:
            failure = pool_and_save(run, setting) if context.is_main else done[setting.key].failure
            if failure is not None:
                failed[setting.key] = failure
        if run.config.machine.enable_memory_optimization:
            release_cached_memory(run.bench.model.device)
    return failed


@contextmanager
def unfinished_saved(run: ProfilingRun, settings: Sequence[Setting]) -> Iterator[None]:
    """A context that, where the run is stopped inside, saves results of the samples that all settings have by then.

    They say that they are unfinished; the same command resumes, and replaces them.
    """
    try:
        yield
    except Stopped:
        context = run.context
        left = [setting for setting in settings if context.ledger.result(setting.key) is None]
        if context.is_main and len(left) > 1 and (saved := save_unfinished(run, left)) is not None:
            print(
                f"stopped: {run.config.machine.output_dir} has {counted(saved[0], 'sample')} of each of "
                f"{counted(saved[1], 'setting')}, as results of an unfinished run",
                file=sys.stderr,
                flush=True,
            )
        raise


@dataclass
class Publisher:
    """Saves what has run so far for those who read beside the run: at most every 5 s and in 1 % of its time."""

    save: Callable[[], object]
    clock: Callable[[], float] = time.monotonic  #: in seconds

    def __post_init__(self) -> None:
        self._due_s = self.clock() + PUBLISHED_EVERY_S

    def __call__(self) -> None:
        """Save, if it is time."""
        began = self.clock()
        if began >= self._due_s:
            self.save()
            ended = self.clock()
            self._due_s = ended + max(PUBLISHED_EVERY_S, 100 * (ended - began))


def save_unfinished(run: ProfilingRun, settings: Sequence[Setting]) -> tuple[int, int] | None:
    """Main process only: results of these settings on the samples that every one of them has by now; of those that
    have none, none are saved.

    Returns:
        how many samples each has, and how many settings; None where no sample has run at all of them.
    """
    context = run.context
    parts = {
        setting: shared.parts_of(shared.own_journals())
        for setting in settings
        for shared in [shared_setting(context, setting.key)]
    }
    finished = {setting: set[int]().union(*map(_finished_ids, own)) for setting, own in parts.items()}
    begun = {setting: ids for setting, ids in finished.items() if ids}
    common = set.intersection(*begun.values()) if len(begun) > 1 else set()
    if not common:
        return None
    for setting in begun:
        merged = merge_parts([part.only(common) for part in parts[setting]], sorted(common))
        if merged.samples:
            summarise_and_save(run, setting, merged, is_stopped=True)
    return len(common), len(begun)


def _finished_ids(part: MeasuredSetting) -> set[int]:
    return {each.sample_id for each in part.samples} | {each.sample_id for each in part.failures}


def wait_for_main(context: RunContext, main_process: MainProcessWatch) -> None:
    """Other processes, at their end: wait until the main one has saved everything.

    Raises:
        WorkerLost: it has ended before, or shows no sign of life.
        Stopped: a stop was requested while waiting.
    """
    with signals_stop(context.stop):
        while not main_process.is_over(context.experiment_id):
            try:
                context.stop.raise_if_requested("while waiting for process 0")
            except WorkerLost:
                # It may have said so and ended between the two looks.
                if not main_process.is_over(context.experiment_id):
                    raise
            time.sleep(_POLL_S)


def pool_and_save(run: ProfilingRun, setting: Setting) -> SettingFailure | None:
    """Main process only: k waits for all shards and pools them, the next letters make the result of the whole."""
    context, config = run.context, run.config
    shared = shared_setting(context, setting.key)
    merged = merge_parts(collect_parts(shared, config.machine.worker_timeout, context.stop), run.requested.sample_ids)
    failure = merged.failure or failure_where_no_sample_ran(merged, config.measuring.max_config_retries + 1)
    if failure is None:
        summarise_and_save(run, setting, merged)
    else:
        context.ledger.mark_failed(setting.key, failure)
    if merged.failure is None:
        # Otherwise they stay: tried again by a later run, the setting resumes after the samples that did run.
        remove_journals(context.journals, setting.key)
    return failure


def summarise_and_save(
    run: ProfilingRun, setting: Setting, merged: MeasuredSetting, *, is_stopped: bool = False
) -> str:
    """Score all samples of a setting; g, h and i say what they come to, j saves the result; returns its file's name.

    Args:
        is_stopped: whether the samples are those that a run had finished when it was stopped.
    """
    requested, bench, ledger = run.requested, run.bench, run.context.ledger
    model, metric = bench.model, bench.metric
    config = run.config
    answers = [answer_of(sample) for sample in merged.samples]
    scoring = scored(answers, metric)
    accuracy = summarise_accuracy(answers, scoring, metric)
    summary = summarise(merged.samples, accuracy, len(merged.failures))
    compute = setting_compute(setting, merged, model, run.provenance.model.dtype)
    energy = with_correct_answers(
        energy_of(merged.energy, merged.energy_passes, merged.energy_end),
        accuracy,
        [
            AnsweredRequest(sample.energy_j, score.value, sample.image_id)
            for sample, score in zip(merged.samples, scoring.scores, strict=True)
        ],
    )
    steadiness = steadiness_part(
        setting.key,
        requested.order,
        config.measuring.until_precision,
        merged,
        is_stopped=is_stopped,
    )
    places = {sample_id: place for place, sample_id in enumerate(requested.sample_ids)}
    as_measured = sorted(merged.samples, key=lambda sample: places[sample.sample_id])
    noted = block_caveats(requested, [setting]) + alone_caveats(merged.samples)
    noted += served_caveats(as_measured, have_waited=steadiness.open_loop is not None)
    provenance = run.provenance.with_keys(
        preparation=bench.requests.describe(),
        experiment_ids=list(merged.experiment_ids),
        run_uids=list(merged.run_uids),
    ).with_caveats(noted)
    result = setting_result(
        setting,
        requested.source.limits.num_total_blocks,
        merged,
        scoring.scores,
        summary,
        requested.drawn,
        compute,
        energy,
        steadiness,
        provenance,
        is_reference=setting == reference_setting(requested.source.limits),
        in_grid=setting not in (requested.beside, requested.placebo),
    )
    result = with_caveats(result)
    name = setting_file_name(result)
    save_setting_result(result, config.machine.output_dir / name)
    if is_stopped:
        ledger.mark_unfinished(setting.key)
    else:
        ledger.mark_done(setting.key, name)
    ledger.remove_others(name)
    return name
