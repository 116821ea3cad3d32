"""The knob run: from a configuration to one result file for each setting, and a table of all.

First the plan: a places the processes, b finds the model, c draws the samples. Then what is due: a gives the run its
id, b loads the model, c prepares its requests, d opens the meters, e measures in rounds, f gathers the facts. The main
process lets k pool the processes, g, h and i make a setting's figures and j save them, for each setting; l writes the
tables.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from experiment_core_utils.a_distributed import (
    ID_NAME,
    RESULTS,
    crew_of,
    generate_unique_id,
    leading,
    setup_distributed,
)
from experiment_core_utils.b_model_loader import follow_run
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.finishing.setting_results import pool_and_save, save_stopped, save_unfinished, wait_for_main
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.l_results_csv_cleaning import write_tables
from experiment_core_utils.measuring.live_table import Publisher
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.planning.planned_run import planned_run
from experiment_core_utils.planning.run import ProfilingRun, loaded_run
from experiment_core_utils.primitives.csv_tables import check_table_format
from experiment_core_utils.primitives.device import release_cached_memory
from experiment_core_utils.primitives.errors import Stopped
from experiment_core_utils.primitives.files import state_folder
from experiment_core_utils.primitives.interruption import signals_stop
from experiment_core_utils.primitives.progress import Progress
from experiment_core_utils.records.run_report import RunReport
from experiment_core_utils.records.settings import SettingFailure
from experiment_core_utils.saved_results.eval_results import write_eval_results
from experiment_core_utils.saved_results.trackers import check_tracker


def run_profiling(config: ProfilingConfig, energy: StageMeasurement | None = None) -> RunReport:
    """Plan, measure what has no result yet, save and tabulate.

    Args:
        energy: what `--energy` measures with; None finds it on the machine.
    """
    folder, machine = config.machine.output_dir, config.machine
    if machine.tracker is not None:
        check_tracker(machine.tracker)
    check_table_format(machine.format)
    crew = crew_of(config)
    if crew is not None and crew.rank:
        follow_run(config, crew)
        return RunReport(None, False, (), {}, (), folder, None)
    with ExitStack() as stack:
        if crew is not None:
            stack.enter_context(leading(crew))
        accelerator = setup_distributed(machine)
        planned = planned_run(config, energy, accelerator, stack)
        id_file = state_folder(folder) / ID_NAME
        experiment_id = generate_unique_id(accelerator, id_file, RESULTS) if planned.due else None
        run_uid = planned.begin(experiment_id, accelerator)
        failed: dict[str, SettingFailure] = {}
        if experiment_id is not None:
            at = planned.requested, accelerator, planned.ledger, experiment_id, run_uid
            run = loaded_run(*at, planned.due, energy)
            # Looked at before each sample and while waiting: no process goes on without the others or its folder.
            stack.enter_context(run.context.stop.watching(planned.check))
            failed = measure_settings(run, planned.due)
            if planned.main_process is not None:
                wait_for_main(run.context, planned.main_process)
        if planned.lock is None:
            return RunReport(experiment_id, False, (), failed, (), folder, None)
        results, task = planned.results(), planned.requested.task
        # A run of fewer settings than the folder has results of does not shorten the tables.
        tabled = (*results, *planned.ledger.results_beside(planned.requested.keys))
        csv_path = write_tables(tabled, task.name, folder, machine.format) if results else None
        write_eval_results(results, task, folder)
        if experiment_id is not None:
            planned.lock.announce_end(experiment_id)
    return RunReport(experiment_id, True, results, failed, planned.left_out, folder, csv_path)


def measure_settings(run: ProfilingRun, settings: Sequence[Setting]) -> dict[str, SettingFailure]:
    """Measure all settings in rounds; pool, summarise and save each. Returns those that failed.

    Raises:
        Stopped, WorkerLost, ResultsNotSaved: with everything that was finished on the disk.
    """
    context, failed = run.context, {}
    if context.is_main and not getattr(run.bench.metric, "runs_foreign_code", False):
        run.measurer.publish = Publisher(lambda: save_unfinished(run, settings))
    with signals_stop(context.stop):
        try:
            with Progress(1, len(settings) * len(context.own_ids), shown=context.is_main) as progress:
                context.stop.raise_if_requested()
                with run.bench.requests:
                    done = run.measurer.measure(dict.fromkeys(settings, context.own_ids), progress)
            run.gather_facts()
            for setting in settings:
                failure = pool_and_save(run, setting) if context.is_main else done[setting.key].failure
                if failure is not None:
                    failed[setting.key] = failure
        except Stopped:
            save_stopped(run, settings)
            raise
        if run.config.machine.enable_memory_optimization:
            release_cached_memory(run.bench.model.device)
    return failed
