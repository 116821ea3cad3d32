"""The letters in order: from a configuration to one result file for each setting of the knobs, and a CSV of all."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from experiment_core_utils.a_distributed import (
    ID_NAME,
    RESULTS,
    check_folder_is_shared,
    generate_unique_id,
    of_main_process,
    outcome_of_all,
    setup_distributed,
)
from experiment_core_utils.asked_run import AskedRun, asked_run
from experiment_core_utils.d_energy_tracking import check_energy, means_of
from experiment_core_utils.drift import fill_in_drift
from experiment_core_utils.fingerprint import agreed_fingerprint
from experiment_core_utils.k_results_aggregation import (
    finished_ids,
    tidy_journals,
)
from experiment_core_utils.l_results_csv_cleaning import (
    places_of,
    samples_csv_beside,
    search_sentence,
    write_samples_csv,
    write_settings_csv,
)
from experiment_core_utils.pareto_run import (
    SEARCH_FILE,
    check_searchable,
)
from experiment_core_utils.primitives.config import ProfilingConfig
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsRefused, WorkerLost, first_line
from experiment_core_utils.primitives.files import read_regular_file, remove_leftovers
from experiment_core_utils.primitives.journal import only_run_in
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.paths import state_folder
from experiment_core_utils.primitives.records import MeasuringOrder, SettingFailure
from experiment_core_utils.primitives.result_files import parsed_json
from experiment_core_utils.primitives.run_plan import PARTS_FOLDER, PLAN_VERSION, RunPlan, write_plan
from experiment_core_utils.profiling_run import ProfilingRun
from experiment_core_utils.progress import Ledger
from experiment_core_utils.setting_plan import left_out_by
from experiment_core_utils.setting_result import SettingResult
from experiment_core_utils.stage_energy import StageMeasurement
from experiment_core_utils.tasks.registry import get_metric

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
    results: tuple[SettingResult, ...]
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
        return EXIT_CODE_FAILED_SAMPLES if any(result.failed_samples for result in self.results) else 0


def run_profiling(config: ProfilingConfig, energy: StageMeasurement | None = None) -> RunReport:
    """Judge what was asked against model and task, load once, then measure and save setting by setting.

    Args:
        energy: what `--energy` measures with; None finds it on the machine.
    """
    asked = asked_run(config)
    if config.pareto_search:
        check_searchable(get_metric(asked.task.metric), len(asked.drawn))
    check_energy(config, energy)
    make_output_dir(config.output_dir)
    # Processes wait for each other here, until the model is loaded; later they meet in their journals only.
    accelerator = setup_distributed(config)
    fingerprint = agreed_fingerprint(config, asked.source, asked.task, asked.drawn.sample_ids, accelerator)
    ledger = Ledger(config.output_dir, fingerprint)
    with ExitStack() as stack:
        of_main_process(lambda: stack.enter_context(only_run_in(config.output_dir / PARTS_FOLDER)), accelerator)
        due_keys = of_main_process(lambda: due_and_tidy(config, asked.order, ledger), accelerator)
        due = settings_of(due_keys, asked.settings)
        experiment_id, failed = new_run_id(config.output_dir, accelerator) if due else None, {}
        plan = plan_of(asked, experiment_id, ledger, due, accelerator.num_processes)
        of_main_process(lambda: write_plan(plan, config.output_dir), accelerator)
        if experiment_id is not None:
            failed = measure_due(asked, due, accelerator, ledger, experiment_id, energy)
        if not accelerator.is_main_process:
            return RunReport(experiment_id, False, (), failed, (), config.output_dir, None)
        results = tuple(result for key in asked.keys if (result := ledger.result(key)) is not None)
        csv_path = write_tables(results, asked.task.name, config.output_dir)
    return RunReport(
        experiment_id,
        True,
        results,
        failed,
        left_out_by(config, asked.source, asked.settings),
        config.output_dir,
        csv_path,
        finished_search(config, asked.keys, ledger),
    )


def new_run_id(output_dir: Path, accelerator: Accelerator) -> str:
    """The next run id, from where this run's state is kept."""
    return generate_unique_id(accelerator, state_folder(output_dir) / ID_NAME, RESULTS)


def measure_due(
    asked: AskedRun,
    due: Sequence[KnobSetting],
    accelerator: Accelerator,
    ledger: Ledger,
    experiment_id: str,
    energy: StageMeasurement | None,
) -> dict[str, SettingFailure]:
    """Load once, then measure and save what is due; returns the settings that failed."""
    config = asked.config
    within_s = min(FOLDER_SEEN_WITHIN_S, config.worker_timeout / 2)
    marker = f"{ledger.fingerprint} {experiment_id}"
    check_folder_is_shared(config.output_dir / PARTS_FOLDER, marker, within_s, accelerator)
    means = outcome_of_all(lambda: means_of(config, accelerator.local_process_index, energy), accelerator)
    run = ProfilingRun(asked, accelerator, ledger, experiment_id, asked.control, means)
    return run.search_front(due) if config.pareto_search else run.measure_all(due)


def write_tables(results: Sequence[SettingResult], task_name: str, folder: Path) -> Path | None:
    """The tables of all settings and of their samples; returns the path of the former, None without results."""
    if not results:
        return None
    csv_path = folder / f"{task_name.replace('_', '-')}_settings.csv"
    write_settings_csv(results, csv_path)
    write_samples_csv(results, samples_csv_beside(csv_path))
    return csv_path


def due_and_tidy(config: ProfilingConfig, order: MeasuringOrder, ledger: Ledger) -> tuple[str, ...]:
    """Keys of the settings that have no result yet, in `order`, once the files in the folder are put in order.

    A search is one piece of work: until it is finished all its settings are due, and their journals are kept.
    """
    remove_leftovers(config.output_dir)
    fill_in_drift(config.output_dir, ledger, order.keys)
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
    asked: AskedRun, experiment_id: str | None, ledger: Ledger, due: Sequence[KnobSetting], num_processes: int
) -> RunPlan:
    """What this run sets out to do, for those who ask how far it has come."""
    journals = asked.config.output_dir / PARTS_FOLDER
    before = [finished_ids(journals, setting.key, ledger.fingerprint) for setting in due]
    return RunPlan(
        schema_version=PLAN_VERSION,
        experiment_id=experiment_id,
        fingerprint=ledger.fingerprint,
        task=asked.task.name,
        keys=asked.keys,
        due=tuple(setting.key for setting in due),
        num_samples=len(asked.drawn),
        num_processes=num_processes,
        num_samples_before=sum(len(ids) for ids in before),
        started_unix_s=time.time(),
    )


def finished_search(config: ProfilingConfig, keys: Sequence[str], ledger: Ledger) -> Mapping[str, Any] | None:
    """The run's own `pareto_search.json`, None where there is none of these settings with all their results."""
    if not config.pareto_search:
        return None
    path = config.output_dir / SEARCH_FILE
    try:
        content = parsed_json(read_regular_file(path))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("fingerprint") != ledger.fingerprint:
        return None
    try:
        searched = list(content["rounds"][0])
        have = all(key in content["failed"] or ledger.result(key) is not None for key in searched)
        # What the closing lines are made of.
        places_of(content), search_sentence(content)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ResultsRefused(f"{path} is broken ({first_line(error)}); remove it, and the search goes on") from error
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
