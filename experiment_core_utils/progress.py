"""In: a run's folder and fingerprint; out: which settings are done, which failed, and how often they were tried."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from experiment_core_utils.j_results_saving import write_json_atomically
from experiment_core_utils.primitives.config import REPOSITORY
from experiment_core_utils.primitives.errors import ResultsError
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
        self._fingerprint = fingerprint
        name = hashlib.sha256(f"{self._output_dir}|{fingerprint}".encode()).hexdigest()[:16]
        self.path = trackers / f"acc_lat_{name}.json"
        self._entries = self._read()

    def result_path(self, key: str) -> Path | None:
        """The result file of a setting that is done, None where it is due."""
        entry = self._entries.get(key)
        if entry is None or entry.result_file is None:
            return None
        path = self._output_dir / entry.result_file
        return path if self._is_own_result(path) else None

    def _is_own_result(self, path: Path) -> bool:
        """Whether the file is there, whole, and of this run: another run in the same folder uses the same names."""
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and content.get("fingerprint") == self._fingerprint

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
            "fingerprint": self._fingerprint,
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
