"""In: a setting's result, or a text step's results; out: their files in the published form.

Every file is written whole or not at all.
"""

import math
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from experiment_core_utils.primitives.csv_tables import named_rows, table_text
from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import write_json_atomically, write_text_atomically
from experiment_core_utils.records.journal import Journal
from experiment_core_utils.records.locks import locked
from experiment_core_utils.records.result_files import (
    LOCAL_ENERGY,
    aggregated_path,
    local_energy_type,
    raw_result_path,
    read_experiments,
)
from experiment_core_utils.records.settings import ArrivedGroup, FinishedSample
from experiment_core_utils.records.text import ProcessPlace


def plain(value: Any, where: str) -> Any:
    """`value` in dicts, lists, text, numbers, booleans and None, nothing lost.

    Tensors and arrays become nested lists, their scalars numbers, tuples lists, paths text.

    Args:
        where: what the value is called, for the message.

    Raises:
        ResultsError: a value that has no such form (an object, a complex number, bytes), a number that is not finite,
            or a key that is not a text; names the place.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value), where)
    if isinstance(value, Mapping):
        return {_text_key(key, where): plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, f"{where}.{index}") for index, each in enumerate(value)]
    # Arrays, tensors (without importing torch) and their scalars.
    if isinstance(value, type) or not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        raise ResultsError(f"{where} cannot be saved: a {type(value).__name__} has no form in JSON; convert it before")
    content = value.tolist()
    if type(content) is type(value):  # some scalars (long double) have no Python form
        raise ResultsError(f"{where} cannot be saved: {value.dtype} has no exact form in JSON; convert it before")
    return plain(content, where)


def _finite(number: float, where: str) -> float:
    if not math.isfinite(number):
        raise ResultsError(f"{where} is {number}: results contain finite numbers, or None with a reason")
    return number


def _text_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ResultsError(f"{where} has the key {key!r}, a {type(key).__name__}: keys must be text")
    return str(key)


def save_samples(journal: Journal, finished: FinishedSample | ArrivedGroup) -> None:
    """Write a sample, or those that arrived together, as one line; all of it is on the disk when this returns."""
    journal.append(finished)


def save_raw_results_json(
    results_dict: Mapping[str, Any],
    experiment_id: str,
    result_type: str,
    accelerator: ProcessPlace,
    *,
    results_dir: Path = Path("results"),
) -> Path:
    """Write one step's results to `raw_results/{id}/{id}_{priority}_{result_type}.json` and return that path.

    `local_energy_results` ends with `_process_{rank}` of this process, and each process writes its own. All other
    types are of the whole run: the main process alone writes them, the others only return the path, so pool over
    processes first. Tensors and arrays become lists, tuples lists, paths text; a file that is there is replaced.

    Raises:
        ConfigurationError: a type that is not known (`PRIORITIES` has them), or an id that is not a part of a file
            name.
        ResultsError: a value that JSON cannot represent, infinities and NaN among them; names its key.
        ResultsNotSaved: the disk does not take it.
    """
    if result_type == LOCAL_ENERGY:
        result_type = local_energy_type(accelerator.process_index)
    path = raw_result_path(experiment_id, result_type, results_dir)
    content = plain(results_dict, result_type)
    if accelerator.process_index == 0 or result_type.startswith(LOCAL_ENERGY):
        write_json_atomically(content, path)
    return path


def save_aggregated_results_json(
    results_dict: Mapping[str, Mapping[str, Any]], task_type: str, *, results_dir: Path = Path("results")
) -> Path:
    """Merge experiments, by name, into `{task_type}_results.json` and return that path.

    One of a name that is there is replaced, the others stay, also where several programs write at once.

    Raises:
        ConfigurationError: a task type that is not a part of a file name.
        ResultsError: a value that JSON cannot represent, or a file that is there and torn: it is left as it is.
        ResultsNotSaved: the disk does not take it.
    """
    path = aggregated_path(task_type, ".json", results_dir)
    new = plain(results_dict, task_type)
    with locked(path):
        write_json_atomically({**read_experiments(path), **new}, path)
    return path


def load_aggregated_results(task_type: str, *, results_dir: Path = Path("results")) -> dict[str, dict[str, Any]]:
    """All experiments of `{task_type}_results.json`, by name; empty before the first is saved.

    Raises:
        ResultsError: the file is torn or contains something else.
    """
    return read_experiments(aggregated_path(task_type, ".json", results_dir))


def flatten_results_to_csv(
    results_dict: Mapping[str, Mapping[str, Any]], task_type: str, *, results_dir: Path = Path("results")
) -> Path:
    """Write `{task_type}_results.csv`, one row an experiment, and return that path; a file that is there is replaced.

    Nested keys are joined by dots, places in lists are numbers (`gpu_names.0`), the name is the column `experiment`.
    See `csv_tables` for how values are written; `read_results_csv` gives them back.

    Raises:
        ConfigurationError: a task type that is not a part of a file name.
        ResultsError: no experiment, a value that no cell can contain, or two keys that would share a column.
        ResultsNotSaved: the disk does not take it.
    """
    path = aggregated_path(task_type, ".csv", results_dir)
    text = table_text(named_rows(plain(results_dict, task_type)))
    with locked(path):
        write_text_atomically(text, path)
    return path


def add_to_results(
    results_dict: Mapping[str, Mapping[str, Any]], task_type: str, *, results_dir: Path = Path("results")
) -> tuple[Path, Path]:
    """Merge experiments into the JSON file and write the CSV anew from all of them, as one act; returns both paths.

    With the two functions above, another program's experiment that comes in between is missing in the CSV.

    Raises:
        ConfigurationError, ResultsError, ResultsNotSaved: as above; the JSON file is saved before the CSV is made.
    """
    with locked(aggregated_path(task_type, "", results_dir)):
        json_path = save_aggregated_results_json(results_dict, task_type, results_dir=results_dir)
        experiments = load_aggregated_results(task_type, results_dir=results_dir)
        return json_path, flatten_results_to_csv(experiments, task_type, results_dir=results_dir)
