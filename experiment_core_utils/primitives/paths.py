"""Places inside the project."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EMBEDDED_MODEL = REPOSITORY / "checkpoints" / "molmoe_tiny"
TRACKERS = REPOSITORY / "persistent_progress_trackers"


def state_folder(results_dir: Path, trackers: Path = TRACKERS) -> Path:
    """Where ledgers and the counter of runs are kept.

    In the checkout where it can be written to, else in the user's state folder (`$XDG_STATE_HOME`, else
    `~/.local/state`), else with the results.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    home = Path(os.environ.get("HOME", ""))
    users = given if given.is_absolute() else home / ".local" / "state"
    own = users / "inference_knob_profiler" / trackers.name
    candidates = [trackers, own] if own.is_absolute() else [trackers]
    return next((each for each in candidates if _is_writable(each)), results_dir / f".{trackers.name}")


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder that is there, or can be made."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
