"""What a run set out to do, in a file of its results folder: for those who watch it from outside."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import read_regular_file, write_text_atomically

# In the results folder: journals, and this file.
PARTS_FOLDER = ".parts"
PLAN_VERSION = 1
_PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class RunPlan:
    """The last run that was begun in a results folder.

    Attributes:
        schema_version: 1.
        experiment_id: id of the run; None where every setting was done already.
        fingerprint: as in the results.
        task: name of the task.
        keys: keys of all settings of the plan.
        due: keys of those that had no result when the run began, in the order in which they are measured.
        num_samples: samples of each setting, over all processes.
        num_processes: of the run.
        num_samples_before: samples of the settings that are due that earlier runs had finished.
        started_unix_s: when it began, in seconds since 1970.
    """

    schema_version: int
    experiment_id: str | None
    fingerprint: str
    task: str
    keys: tuple[str, ...]
    due: tuple[str, ...]
    num_samples: int
    num_processes: int
    num_samples_before: int
    started_unix_s: float


_PLAN = TypeAdapter(RunPlan)


def write_plan(plan: RunPlan, output_dir: Path) -> None:
    """Write it whole or not at all, over that of the run before; raises ResultsNotSaved."""
    write_text_atomically(_PLAN.dump_json(plan, indent=1).decode() + "\n", plan_path(output_dir))


def folders_with_plans(folder: Path) -> list[Path]:
    """The folder itself and its subfolders, those in which a run was begun: several datasets have one each."""
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
            f"{output_dir} holds no plan of a run ({PARTS_FOLDER}/{_PLAN_FILE}); give the --output_dir of a run that "
            "has begun"
        ) from error
    except (OSError, ValidationError) as error:
        raise ResultsRefused(f"{path} is no plan of this version; begin the run again") from error
    counts = (plan.num_samples, plan.num_samples_before, plan.num_processes - 1)
    # Times are divided by counts, which must fit a float.
    if not (0 < plan.started_unix_s < 1e11 and all(0 <= count <= 2**53 for count in counts)):
        raise ResultsRefused(f"{path} is broken: its numbers are none of a run; begin the run again")
    if plan.schema_version != PLAN_VERSION:
        raise ResultsRefused(f"{path} is of schema {plan.schema_version}, this version reads {PLAN_VERSION}")
    return plan
