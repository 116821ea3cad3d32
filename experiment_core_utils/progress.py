"""In: a run's folder and fingerprint; out: which settings are done, which failed, and how often they were tried."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_json_atomically
from experiment_core_utils.primitives.paths import REPOSITORY
from experiment_core_utils.primitives.records import SettingFailure

TRACKERS = REPOSITORY / "persistent_progress_trackers"


@dataclass(frozen=True)
class LedgerEntry:
    """One setting: the name of its result file, or how it failed."""

    result_file: str | None
    failure: SettingFailure | None


class Ledger:
    """The settings of one run (one output folder and one fingerprint), kept in `persistent_progress_trackers/`.

    A setting is done when its result file is there and carries this run's fingerprint; deleting the file, or
    overwriting it by another run, makes it due again.
    """

    def __init__(self, output_dir: Path, fingerprint: str, trackers: Path = TRACKERS) -> None:
        self._output_dir = output_dir.resolve()
        self.fingerprint = fingerprint
        name = hashlib.sha256(f"{self._output_dir}|{fingerprint}".encode()).hexdigest()[:16]
        self.path = trackers / f"acc_lat_{name}.json"
        self._entries = self._read()

    def result_path(self, key: str) -> Path | None:
        """The result file of a setting that is done, None where it is due."""
        return None if self.result(key) is None else self._path_of(key)

    def result(self, key: str) -> dict[str, Any] | None:
        """The content of that file, None where the setting is due: no file, a torn one, or one of another run, which
        uses the same names."""
        path = self._path_of(key)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        is_own = isinstance(content, dict) and content.get("fingerprint") == self.fingerprint
        return content if is_own else None

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

    def mark_done(self, key: str, result_file: str) -> None:
        """Remember a setting whose file is written."""
        self._write(key, LedgerEntry(result_file, None))

    def mark_failed(self, key: str, failure: SettingFailure) -> None:
        """Remember a setting that could not be run."""
        self._write(key, LedgerEntry(None, failure))

    def _write(self, key: str, entry: LedgerEntry) -> None:
        self._entries[key] = entry
        content = {
            "output_dir": str(self._output_dir),
            "fingerprint": self.fingerprint,
            "settings": {name: asdict(item) for name, item in self._entries.items()},
        }
        write_json_atomically(content, self.path)

    def _read(self) -> dict[str, LedgerEntry]:
        if not self.path.exists():
            return {}
        try:
            settings = json.loads(self.path.read_text())["settings"]
            return {key: _entry(stored) for key, stored in settings.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsError(f"{self.path} is not a ledger of this version ({error}); delete it") from error


def _entry(stored: dict[str, object]) -> LedgerEntry:
    failure = stored["failure"]
    result_file = stored["result_file"]
    return LedgerEntry(
        str(result_file) if result_file is not None else None,
        SettingFailure(**failure) if isinstance(failure, dict) else None,
    )
