"""A finished run in an experiment tracker, through accelerate: each setting is a step, in the order of the plan."""

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.columns import IDENTITY_COLUMNS
from experiment_core_utils.records.setting_result import SettingResult
from experiment_core_utils.tables.frames import table_of_settings

PROJECT = "inference-knob-profiler"
# Folder in that of the results where trackers that write files do so.
FOLDER = "trackers"


def check_tracker(name: str) -> None:
    """Raises ConfigurationError where the tracker's package is not installed."""
    available = sorted(str(tracker) for tracker in get_available_trackers())
    if name not in available:
        raise ConfigurationError(
            f"--tracker {name}: its package is not installed (installed: {', '.join(available) or 'none'}); "
            "install it, or drop the flag"
        )


def log_settings(results: Sequence[SettingResult], name: str, folder: Path, conclusion: str | None = None) -> None:
    """Log the numbers of the CSV of settings, by its names; what does not change, the settings' names and the
    sentence of the conclusion, as the run's configuration.
    """
    table = table_of_settings(results)
    # The table leaves empty columns out.
    constant = [column.name for column in IDENTITY_COLUMNS if column.name != "setting"] + ["experiment_id"]
    named = [name for name in constant if name in table]
    run = {name: str(table[name].iloc[0]) for name in named}
    run |= {f"setting_{step}": str(key) for step, key in enumerate(table["setting"])}
    run |= {} if conclusion is None else {"conclusion": conclusion}
    accelerator = Accelerator(log_with=name, project_dir=folder / FOLDER)
    # It would write into the working directory.
    own = {"wandb": {"dir": str(folder / FOLDER)}} if name == "wandb" else {}
    accelerator.init_trackers(PROJECT, config=run, init_kwargs=own)
    numbers = table.select_dtypes("number")
    for step in range(len(table)):
        accelerator.log({str(name): float(value) for name, value in numbers.iloc[step].dropna().items()}, step=step)
    # Not `end_training`, which would also wait for the run's other processes.
    for tracker in accelerator.trackers:
        tracker.finish()
