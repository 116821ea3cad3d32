"""The folder of the results before a run: made, checked and put in order, and what is still due in it."""

import tempfile
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path

from experiment_core_utils.knobs.setting import Setting, reference_setting
from experiment_core_utils.l_results_csv_cleaning import table_paths
from experiment_core_utils.meters.requested_energy import check_energy
from experiment_core_utils.meters.stages import StageMeasurement
from experiment_core_utils.planning.plan import RequestedRun, plan_size
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError, WorkerLost
from experiment_core_utils.primitives.files import check_replaceable, remove_leftovers
from experiment_core_utils.records.journal import finished_samples, own_journals, tidy_journals
from experiment_core_utils.records.ledger import PARTS_FOLDER, PLAN_VERSION, Ledger, RunPlan, read_plan
from experiment_core_utils.records.setting_result import save_setting_result


def check_and_make_folder(requested: RequestedRun, energy: StageMeasurement | None) -> None:
    """Refuse what can be known to fail before anything is written, then make the folder of the results.

    Raises:
        ConfigurationError: the folder cannot be made or written to.
        EnergyRefused: energy is required and nothing on this machine measures it.
        OutputRefused: a folder, a link or a device has the name of a table that the run would write at its end.
    """
    config = requested.config
    folder = config.machine.output_dir
    if config.measuring.energy == "required":
        check_energy(requested.source, config.machine.device, folder, energy)
    for path in table_paths(requested.task.name, folder, config.machine.format) if folder.is_dir() else ():
        check_replaceable(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--output_dir {folder} cannot be written to ({error.strerror}); give another folder"
        ) from error


def fill_in_places(requested: RequestedRun, ledger: Ledger) -> None:
    """Write into results of earlier runs whether they are of the reference setting, and that the grid has them now."""
    for setting in requested.settings:
        result = ledger.result(setting.key)
        if result is None:
            continue
        found = {
            "is_reference": setting == reference_setting(requested.source.limits),
            "in_grid": setting not in (requested.beside, requested.placebo) or result.in_grid,
        }
        if (result.is_reference, result.in_grid) != tuple(found.values()):
            path = ledger.result_path(setting.key)
            assert path is not None
            save_setting_result(result.with_keys(**found), path)


def tidy_folder(folder: Path, ledger: Ledger, keys: Collection[str], due: Collection[str]) -> dict[str, int]:
    """Put the files of earlier runs in order; of the settings' journals those that are `due` are kept.

    Returns:
        as `tidy_journals`.

    Raises:
        ResultsError: a process of another run is writing here.
    """
    remove_leftovers(folder)
    ledger.list_found()
    return tidy_journals(folder / PARTS_FOLDER, ledger.fingerprint, lambda key: key in keys and key not in due)


def settings_of(keys: Sequence[str], plan: Sequence[Setting]) -> list[Setting]:
    """The settings that the main process will measure, in its order.

    Raises:
        WorkerLost: this process was not given one of them.
    """
    by_key = {setting.key: setting for setting in plan}
    missing = [key for key in keys if key not in by_key]
    if missing:
        raise WorkerLost(f"this process was not given the setting {missing[0]}: all need the same arguments")
    return [by_key[key] for key in keys]


def run_uid_of(requested: RequestedRun, ledger: Ledger, due: Sequence[Setting]) -> str:
    """The random identity of the run: that of the run before where this one resumes it, else a new one.

    A run resumes another of the same settings and flags where settings that are due have samples of it.
    """
    try:
        before = read_plan(requested.config.machine.output_dir)
    except ResultsError:  # none, or one that this run writes anew
        return uuid.uuid4().hex
    is_alike = (before.keys, before.fingerprint) == (requested.keys, ledger.fingerprint)
    journals = [own_journals(requested.journals, each.key, ledger.fingerprint).values() for each in due]
    begun = {uid for own in journals for content in own for uid in content.run_uids}
    return before.run_uid if before.run_uid in begun and is_alike else uuid.uuid4().hex


def plan_of(
    requested: RequestedRun,
    experiment_id: str | None,
    ledger: Ledger,
    due: Sequence[Setting],
    num_processes: int,
    run_uid: str | None = None,
) -> RunPlan:
    """What this run sets out to do, for those who ask how far it has come."""
    before = [finished_samples(requested.journals, setting.key, ledger.fingerprint) for setting in due]
    return RunPlan(
        schema_version=PLAN_VERSION,
        experiment_id=experiment_id,
        run_uid=run_uid,
        fingerprint=ledger.fingerprint,
        task=requested.task.name,
        keys=requested.keys,
        due=tuple(setting.key for setting in due),
        num_samples=len(requested.drawn),
        num_processes=num_processes,
        num_samples_before=sum(map(len, before)),
        started_unix_s=time.time(),
        arrivals_s=plan_size(requested.config, len(requested.drawn), num_processes).arrivals_s,
    )
