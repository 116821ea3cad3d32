"""The files that say how a run stands: its ledger of which settings ended and how, and its plan, which `status`
reads."""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import to_json

from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import (
    read_regular_file,
    remove_file,
    write_json_atomically,
    write_text_atomically,
)
from experiment_core_utils.records.result_files import (
    check_schema,
    field_fault,
    parsed_json,
    read_json,
    result_files_in,
)
from experiment_core_utils.records.setting_result import SCHEMA_VERSION, SettingResult
from experiment_core_utils.records.settings import SettingFailure


@dataclass(frozen=True)
class LedgerEntry:
    """One setting: the name of its result file, or how it failed."""

    result_file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,240}\.json$")] | None
    failure: SettingFailure | None


def _result_bytes(path: Path) -> bytes:
    """All of a result file, nothing where it is gone.

    Raises:
        ResultsRefused: the disk does not give it; taken for one that is not there, it would be measured again.
    """
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ResultsRefused(
            f"{path} cannot be read ({error.strerror}); see that the disk is there, or move the file away"
        ) from error


def _is_whole(content: bytes, fingerprint: str) -> bool:
    """Whether a result file is of this fingerprint, and not of the samples that a run had finished when it stopped."""
    return fingerprint.encode() in content and not _is_stopped(content)


def _is_stopped(content: bytes) -> bool:
    """Whether a result file is of the samples that a run had finished when it stopped."""
    return re.search(rb'"stopped_by":\s*"stopped"', content) is not None


_ENTRIES = TypeAdapter(dict[str, LedgerEntry])
# In the results folder: journals, ledgers, and the plan of the last run.
PARTS_FOLDER = ".parts"


class Ledger:
    """The settings of one run (one output folder and one fingerprint), kept in the folder, which can so be moved.

    A setting is done when its result file is there and carries this run's fingerprint; deleting the file, or
    overwriting it by another run, makes it due again. Result files of this fingerprint count also where the ledger
    lacks them, such as in a copy without hidden folders; those of a run that was stopped do not.
    """

    def __init__(self, output_dir: Path, fingerprint: str) -> None:
        self._output_dir = output_dir.resolve()
        self.fingerprint = fingerprint
        self.path = self._output_dir / PARTS_FOLDER / f"ledger_{fingerprint}.json"
        self._entries = self._read(self.path)
        self._unlisted = {
            key: name
            for name, (_, key) in result_files_in(self._output_dir).items()
            if key not in self._entries and _is_whole(_result_bytes(self._output_dir / name), fingerprint)
        }
        self._entries |= {key: LedgerEntry(name, None) for key, name in self._unlisted.items()}

    @property
    def output_dir(self) -> Path:
        """The folder of the results."""
        return self._output_dir

    def result_path(self, key: str) -> Path | None:
        """The result file of a setting that is done, None where it is due."""
        return None if self._own_content(key) is None else self._path_of(key)

    def _own_content(self, key: str) -> dict[str, Any] | None:
        """The content of that file, unchecked; None where the setting is due: no file, a torn one, or one of another
        run, which uses the same names.

        Raises:
            ResultsRefused: it cannot be read, or something else than a file has its name, so that no result could be
                written there.
        """
        path = self._path_of(key)
        if path is None or not path.exists():
            return None
        if not path.is_file():
            raise ResultsRefused(f"{path} is not a result, but a folder, a pipe or a device; move it away")
        try:
            content = parsed_json(_result_bytes(path))
        except ValueError:
            return None
        is_own = isinstance(content, dict) and content.get("fingerprint") == self.fingerprint
        return content if is_own else None

    def result(self, key: str) -> SettingResult | None:
        """The result of a setting; None where the setting is due, as with one without samples.

        Raises:
            ResultsRefused: it is of another schema, a field of it is missing or cannot be, or something else than a
                file has its name.
        """
        content = self._own_content(key)
        if content is None:
            return None
        path = self._path_of(key)
        advice = "resume with the version that wrote it, or give another --output_dir"
        check_schema(content.get("schema_version"), SCHEMA_VERSION, f"{path} is not a result", advice)
        if not content.get("per_sample_results"):
            return None
        return SettingResult.from_content(content, str(path), "remove it, and the same command measures it again")

    def results_beside(self, keys: Collection[str]) -> list[SettingResult]:
        """Results of this fingerprint of settings other than these, by key: other runs planned them.

        Broken ones, which every analysis names, are left out.
        """
        found = []
        for key in sorted(set(self._entries) - set(keys)):
            with suppress(ResultsRefused):
                found.append(self.result(key))
        return [each for each in found if each is not None]

    def contents_of_others(self, task: str) -> list[tuple[str, dict[str, Any]]]:
        """The setting and the content, unchecked, of each of the task's result files of another fingerprint."""
        found = []
        for name, (of_task, key) in result_files_in(self._output_dir).items():
            if of_task == task.replace("_", "-"):
                with suppress(OSError, ValueError):
                    content = parsed_json((self._output_dir / name).read_bytes())
                    if isinstance(content, dict) and content.get("fingerprint") not in (None, self.fingerprint):
                        found.append((key, content))
        return found

    def has_result_file(self, key: str) -> bool:
        """Whether a setting is marked done and its file is there; unlike `result`, the file is not read."""
        path = self._path_of(key)
        return path is not None and path.is_file()

    def failure(self, key: str) -> SettingFailure | None:
        """Why the last attempt at a setting failed; None where it did not, or there was none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.failure

    def _path_of(self, key: str) -> Path | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.result_file is None else self._output_dir / entry.result_file

    def list_found(self) -> None:
        """Write down the result files that the ledger lacked."""
        for key, name in self._unlisted.items():
            self.mark_done(key, name)

    def mark_done(self, key: str, result_file: str) -> None:
        """Remember a setting whose file is written."""
        self._write(key, LedgerEntry(result_file, None))

    def mark_unfinished(self, key: str) -> None:
        """Remember that a setting is due, whatever file of an unfinished run has its name."""
        if self._entries.pop(key, None) is not None:
            self._save()

    def remove_others(self, result_file: str) -> None:
        """Remove other result files of the file's task and setting: `crops` in their names is of other samples."""
        names = result_files_in(self._output_dir)
        for name, setting in names.items():
            if name != result_file and setting == names[result_file]:
                remove_file(self._output_dir / name)

    def mark_failed(self, key: str, failure: SettingFailure) -> None:
        """Remember a setting that could not be run; what an unfinished run left of it goes."""
        for name, (_, of_file) in result_files_in(self._output_dir).items():
            content = _result_bytes(self._output_dir / name) if of_file == key else b""
            if self.fingerprint.encode() in content and _is_stopped(content):
                remove_file(self._output_dir / name)
        self._write(key, LedgerEntry(None, failure))

    def _write(self, key: str, entry: LedgerEntry) -> None:
        self._entries[key] = entry
        self._save()

    def _save(self) -> None:
        content = {
            "fingerprint": self.fingerprint,
            "settings": _ENTRIES.dump_python(self._entries),
        }
        write_json_atomically(content, self.path)

    def _read(self, path: Path) -> dict[str, LedgerEntry]:
        if not path.exists():
            return {}
        try:
            return _ENTRIES.validate_json(to_json(read_json(path, "delete it")["settings"]), strict=True)
        except (ResultsRefused, KeyError, TypeError, ValidationError) as error:
            fault = field_fault(error) if isinstance(error, ValidationError) else error
            raise ResultsRefused(f"{path} is not a ledger of this version ({fault}); delete it") from error


PLAN_VERSION = 1
_PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class RunPlan:
    """The last run that was started in a results folder."""

    schema_version: int  #: 1
    experiment_id: str | None  #: id of the run; None where every setting was done already
    fingerprint: str  #: as in the results
    task: str  #: name of the task
    keys: tuple[str, ...]  #: keys of all settings of the plan
    #: keys of those that had no result when the run began, in the order in which they are measured
    due: tuple[str, ...]
    num_samples: int  #: samples of each setting, over all processes
    num_processes: int  #: of the run
    num_samples_before: int  #: samples of the settings that are due that earlier runs had finished
    started_unix_s: float  #: when it began, in seconds since 1970
    #: the time in which the requests of a setting arrive, in all runs together; None without `--request_rate`
    arrivals_s: float | None = None
    run_uid: str | None = None  #: the run's, as in the results; None where `experiment_id` is, and at dfe8f148


_PLAN = TypeAdapter(RunPlan)


def write_plan(plan: RunPlan, output_dir: Path) -> None:
    """Write it whole or not at all, over that of the run before; raises ResultsNotSaved."""
    write_text_atomically(_PLAN.dump_json(plan, indent=1).decode() + "\n", plan_path(output_dir))


def folders_with_plans(folder: Path) -> list[Path]:
    """The folder itself and its subfolders, those in which a run was started: several datasets have one each."""
    return [each for each in (folder, *sorted(folder.glob("*/"))) if plan_path(each).is_file()]


def plan_path(output_dir: Path) -> Path:
    """Where the plan of a results folder lies."""
    return output_dir / PARTS_FOLDER / _PLAN_FILE


def read_plan(output_dir: Path) -> RunPlan:
    """The plan of the last run in a results folder.

    Raises:
        ResultsError: there is none, or not of this version.
    """
    path = plan_path(output_dir)
    try:
        plan = _PLAN.validate_json(read_regular_file(path), strict=True)
    except FileNotFoundError as error:
        raise ResultsError(
            f"{output_dir} contains no plan of a run ({PARTS_FOLDER}/{_PLAN_FILE}); give the --output_dir of a run "
            f"that has started"
        ) from error
    except (OSError, ValidationError) as error:
        raise ResultsRefused(f"{path} is not a plan of this version; begin the run again") from error
    counts = (plan.num_samples, plan.num_samples_before, plan.num_processes - 1)
    # Times are divided by counts, which must fit a float.
    if not (0 < plan.started_unix_s < 1e11 and all(0 <= count <= 2**53 for count in counts)):
        raise ResultsRefused(f"{path} is broken: its numbers cannot be those of a run; begin the run again")
    check_schema(plan.schema_version, PLAN_VERSION, f"{path} is not a plan", "begin the run again")
    return plan
