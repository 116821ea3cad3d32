"""The knob run: from a configuration to one result file for each setting, and a CSV of all."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import ID_NAME, RESULTS, generate_unique_id, setup_distributed
from experiment_core_utils.config.profiling import ProfilingConfig
from experiment_core_utils.d_energy_tracking import check_energy, meters_of
from experiment_core_utils.l_results_csv_cleaning import check_table_format, write_tables
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.primitives.collectives import (
    all_or_raise,
    broadcast_from_main,
    check_folder_is_shared,
    processes_on_this_machine,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import state_folder
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.records.journal import only_run_in
from experiment_core_utils.records.ledger import PARTS_FOLDER, Ledger, write_plan
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.records.settings import SettingFailure
from experiment_core_utils.saved_results.eval_results import write_eval_results
from experiment_core_utils.saved_results.trackers import check_tracker, log_settings
from experiment_core_utils.sweep.front import check_searchable, finished_search
from experiment_core_utils.sweep.plan import (
    RequestedRun,
    agreed_fingerprint,
    due_and_tidy,
    left_out_by,
    plan_of,
    requested_run,
    settings_of,
)
from experiment_core_utils.sweep.run import ProfilingRun, context_of, load_bench, provenance_of_run
from experiment_core_utils.tasks.registry import get_metric

EXIT_CODE_FAILED_SAMPLES = 3
FOLDER_SEEN_WITHIN_S = 90.0


@dataclass(frozen=True)
class RunReport:
    """What a run leaves behind."""

    experiment_id: str | None  #: None where every setting was done already
    is_main_process: bool
    #: contents of the settings' files, in the order of the plan; settings that failed are not among them
    results: tuple[SettingResult, ...]
    failed: Mapping[str, SettingFailure]  #: settings that could not be run
    #: for each knob of which the strategy measured fewer values than were given, those left out, as text
    left_out: tuple[str, ...]
    output_dir: Path
    #: the table of all settings; None where every setting failed, and on processes other than the main one
    csv_path: Path | None
    #: content of `pareto_search.json`; None where no front was searched, and on other processes
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
        return EXIT_CODE_FAILED_SAMPLES if any(result.failed_samples for result in self.results) else 0


def run_profiling(config: ProfilingConfig, energy: StageMeasurement | None = None) -> RunReport:
    """Find model and samples, plan, then measure and save setting by setting what has no result yet, and tabulate.

    Args:
        energy: what `--energy` measures with; None finds it on the machine.
    """
    folder, is_search = config.machine.output_dir, config.search.pareto_search
    # Processes wait for each other here, until the model is loaded; later they meet in their journals only.
    if config.machine.tracker is not None:
        check_tracker(config.machine.tracker)
    check_table_format(config.machine.format)
    accelerator = setup_distributed(config.machine)
    requested = requested_run(config)
    check_and_make_folder(requested, energy)
    fingerprint = agreed_fingerprint(config, requested.source, requested.task, requested.drawn.sample_ids, accelerator)
    ledger = Ledger(folder, fingerprint)
    with ExitStack() as stack:
        broadcast_from_main(lambda: stack.enter_context(only_run_in(folder / PARTS_FOLDER)), accelerator)
        due_keys = broadcast_from_main(
            lambda: due_and_tidy(folder, requested.order, ledger, is_search=is_search), accelerator
        )
        due = settings_of(due_keys, requested.settings)
        id_file = state_folder(folder) / ID_NAME
        experiment_id, failed = generate_unique_id(accelerator, id_file, RESULTS) if due else None, {}
        plan = plan_of(requested, experiment_id, ledger, due, accelerator.num_processes)
        broadcast_from_main(lambda: write_plan(plan, folder), accelerator)
        if experiment_id is not None:
            failed = measure_due(requested, due, accelerator, ledger, experiment_id, energy)
        if not accelerator.is_main_process:
            return RunReport(experiment_id, False, (), failed, (), folder, None)
        results = tuple(result for key in requested.keys if (result := ledger.result(key)) is not None)
        csv_path = write_tables(results, requested.task.name, folder, config.machine.format) if results else None
        write_eval_results(results, requested.source.limits, requested.task, folder)
    if config.machine.tracker is not None and results:
        log_settings(results, config.machine.tracker, folder)
    return RunReport(
        experiment_id,
        True,
        results,
        failed,
        left_out_by(config.knobs, requested.source, requested.settings),
        folder,
        csv_path,
        finished_search(folder, requested.keys, ledger) if is_search else None,
    )


def measure_due(
    requested: RequestedRun,
    due: Sequence[KnobSetting],
    accelerator: Accelerator,
    ledger: Ledger,
    experiment_id: str,
    energy: StageMeasurement | None,
) -> dict[str, SettingFailure]:
    """Load once, gather the facts, then measure, pool and save what is due; returns the settings that failed."""
    config = requested.config
    within_s = min(FOLDER_SEEN_WITHIN_S, config.machine.worker_timeout / 2)
    marker = f"{ledger.fingerprint} {experiment_id}"
    check_folder_is_shared(config.machine.output_dir / PARTS_FOLDER, marker, within_s, accelerator)

    mode = config.measuring.energy

    def find_meters() -> StageMeasurement | None:
        return all_or_raise(
            lambda: meters_of(mode, config.machine.device, accelerator.local_process_index, config.task.seed, energy),
            accelerator,
        )

    # Where energy is required, a meter that is not there is reported before the weights are read.
    required = find_meters() if mode == "required" else None
    processes_here = processes_on_this_machine(accelerator)
    context = context_of(requested, accelerator, ledger, experiment_id)
    bench = load_bench(requested, context, accelerator, processes_here)
    model = bench.model
    provenance = provenance_of_run(
        requested, accelerator, model.device, processes_here, experiment_id, model.describe()
    )
    run = ProfilingRun(requested, context, bench, provenance, requested.control, required or find_meters())
    return run.search_front(due) if config.search.pareto_search else run.measure_all(due)


def check_and_make_folder(requested: RequestedRun, energy: StageMeasurement | None) -> None:
    """Refuse what can be known to fail before anything is written, then make the folder of the results."""
    config = requested.config
    if config.search.pareto_search:
        check_searchable(get_metric(requested.task.metric), len(requested.drawn))
    if config.measuring.energy == "required":
        check_energy(config.machine.device, config.machine.output_dir, energy)
    make_output_dir(config.machine.output_dir)


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
