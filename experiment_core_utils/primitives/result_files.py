"""In: an experiment or a kind of task; out: where its published files stand, and the one file of many experiments."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import check_file_name_part
from experiment_core_utils.primitives.flat_table import named_rows

LOCAL_ENERGY = "local_energy_results"
# Published numbers of an experiment's files, by what they hold.
PRIORITIES = {
    "experiment_setup": 1,
    "experiment_variables": 2,
    "model_architecture": 3,
    "inference_metrics": 4,
    "compute_metrics": 5,
    "memory_timeline": 5,
    LOCAL_ENERGY: 6,
    "global_energy_results": 7,
    "apportioned_energy": 7,
    "text_output": 8,
    "token_output": 8,
}
_OF_ONE_PROCESS = re.compile(rf"{LOCAL_ENERGY}_process_(0|[1-9][0-9]*)")


def raw_result_path(experiment_id: str, result_type: str, results_dir: Path) -> Path:
    """`{results_dir}/raw_results/{id}/{id}_{priority}_{result_type}.json`.

    Args:
        result_type: one of PRIORITIES, of which `local_energy_results` needs `_process_{rank}` behind it.

    Raises:
        ConfigurationError: a type that is not known, or an id that is no part of a file name.
    """
    check_file_name_part(experiment_id, "the experiment id")
    kind = LOCAL_ENERGY if _OF_ONE_PROCESS.fullmatch(result_type) else result_type
    if kind not in PRIORITIES or result_type == LOCAL_ENERGY:
        known = ", ".join(f"{each}_process_RANK" if each == LOCAL_ENERGY else each for each in PRIORITIES)
        raise ConfigurationError(f"there is no result type {result_type!r}; known are {known}")
    return results_dir / "raw_results" / experiment_id / f"{experiment_id}_{PRIORITIES[kind]}_{result_type}.json"


def local_energy_type(rank: int) -> str:
    """The result type of one process's energy."""
    return f"{LOCAL_ENERGY}_process_{rank}"


def aggregated_path(task_type: str, suffix: str, results_dir: Path) -> Path:
    """`{results_dir}/{task_type}_results{suffix}`; raises ConfigurationError for a type that is no file name part."""
    check_file_name_part(task_type, "the task type")
    return results_dir / f"{task_type}_results{suffix}"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a results file.

    Raises:
        ResultsError: not there, torn, or no JSON object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ResultsError(f"{path} holds no JSON object; move it away, it is no results file")
    return content


def read_json(path: Path) -> Any:
    """Any content; raises ResultsError for a file that is not there or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"{path} cannot be read ({error}); repair it or move it away, it is left as it is"
        ) from error


def read_versioned_object(path: Path, what: str, version: int) -> dict[str, Any]:
    """The object in a file of one schema.

    Args:
        what: it is, for the message: "energy file".

    Raises:
        ResultsError: not there, torn, or of another schema.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); remove it or measure again") from error
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found != version:
        raise ResultsError(f"{path} is no {what} of schema {version} (it says {found}); remove it")
    return dict(content)


def read_experiments(path: Path) -> dict[str, dict[str, Any]]:
    """The experiments that a file of many holds, by name; empty where there is no file yet.

    Raises:
        ResultsError: torn, or something else than a dict of dicts.
    """
    if not path.exists():
        return {}
    content = read_json_object(path)
    foreign = next((name for name, each in content.items() if not isinstance(each, Mapping)), None)
    if foreign is not None:
        raise ResultsError(f"{path} holds {foreign!r}, which is no experiment; move the file away, it is left as it is")
    return content


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """What a JSON file holds as rows of a table: many experiments by name, a list of them, or a single one.

    Raises:
        ResultsError: not there, torn, or neither of these.
    """
    content = read_json(path)
    if isinstance(content, list) and all(isinstance(each, Mapping) for each in content):
        return content
    if not isinstance(content, Mapping):
        raise ResultsError(f"{path} holds neither a dict nor a list of dicts; give a results file")
    return [content] if _is_one_experiment(content) else named_rows(content)


def _is_one_experiment(content: Mapping[str, Any]) -> bool:
    types = all(key in PRIORITIES or _OF_ONE_PROCESS.fullmatch(key) for key in content)
    return bool(content) and (types or not all(isinstance(each, Mapping) for each in content.values()))
