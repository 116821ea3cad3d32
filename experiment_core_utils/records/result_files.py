"""File names of text experiments and of tracebacks, and strict reading of JSON."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from experiment_core_utils.knobs.setting import Setting, parsed_labels
from experiment_core_utils.primitives.csv_tables import named_rows
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    OtherVersion,
    ResultsError,
    ResultsRefused,
    first_line,
)
from experiment_core_utils.primitives.files import (
    check_file_name_part,
    read_regular_file,
    shortened,
    write_text_atomically,
)
from experiment_core_utils.primitives.texts import short_digest

TRACEBACKS = "tracebacks"  # folder of them, within that of the results
LOCAL_ENERGY = "local_energy_results"
# Published numbers of an experiment's files, by what they contain.
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
# A number that may be too large for a float, which Python would read as infinity, where 0 means every digit.
_AS_ZEROS = bytes.maketrans(b"E123456789", b"e000000000")
_LARGE_EXPONENT = re.compile(rb"0e\+?000+(?:[\s,\]}]|$)")
# With an exponent of two digits, fewer stay below 1e300.
_MANY_DIGITS = 200 * b"0"
_TOO_DEEP = "it is nested more than 200 deep"
# The files of settings; task, vision target and decoder of one.
RESULT_FILES = "*_imgsize*.json"
# Of what a run came to.
CONCLUSION_FILE = "conclusion.json"
_OF_ONE_PROCESS = re.compile(rf"{LOCAL_ENERGY}_process_(0|[1-9][0-9]*)")


def raw_result_path(experiment_id: str, result_type: str, results_dir: Path) -> Path:
    """`{results_dir}/raw_results/{id}/{id}_{priority}_{result_type}.json`.

    Args:
        result_type: one of PRIORITIES, of which `local_energy_results` needs `_process_{rank}` behind it.

    Raises:
        ConfigurationError: a type that is not known, or an id that is not a part of a file name.
    """
    check_file_name_part(experiment_id, "the experiment id")
    kind = LOCAL_ENERGY if _OF_ONE_PROCESS.fullmatch(result_type) else result_type
    if kind not in PRIORITIES or result_type == LOCAL_ENERGY:
        known = ", ".join(f"{each}_process_RANK" if each == LOCAL_ENERGY else each for each in PRIORITIES)
        raise ConfigurationError(f"there is no result type {result_type!r}; known are {known}")
    return results_dir / "raw_results" / experiment_id / f"{experiment_id}_{PRIORITIES[kind]}_{result_type}.json"


def saved_traceback(trace: str, kind: str, results_dir: Path) -> str:
    """Write a traceback to `{results_dir}/tracebacks/{kind}-{digest}.txt`, and return what an error says of it.

    Equal ones are one file. The return value is empty where there is no traceback.

    Args:
        kind: class of the error.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    if not trace:
        return ""
    name = f"{kind}-{short_digest(trace.encode('utf-8', 'backslashreplace'))}.txt"
    # Names of files may have bytes in them that are not UTF-8.
    text = trace.encode("utf-8", "backslashreplace").decode("utf-8")
    write_text_atomically(text, results_dir / TRACEBACKS / name)
    return f" (traceback: {TRACEBACKS}/{name})"


def result_files_in(folder: Path) -> dict[str, tuple[str, str]]:
    """Name of each result file of a setting in the folder -> its task, as names have it, and its setting's key.

    The mean number of crops in a name does not count: it is of the samples that were drawn.
    """
    found = {path.name: _task_and_key(path.name) for path in sorted(folder.glob(RESULT_FILES))}
    return {name: named for name, named in found.items() if named is not None and (folder / name).is_file()}


def _task_and_key(name: str) -> tuple[str, str] | None:
    """The task and the setting's key that a file name contains; None where the name is not of that form."""
    task, _, rest = name.removesuffix(".json").rpartition("_imgsize")
    labels = [each for each in rest.split("_") if not (each.startswith("crops") and each[5:].isdecimal())]
    values = parsed_labels(labels)
    return (task, Setting(values).key) if task and values else None


def local_energy_type(rank: int) -> str:
    """The result type of one process's energy."""
    return f"{LOCAL_ENERGY}_process_{rank}"


def aggregated_path(task_type: str, suffix: str, results_dir: Path) -> Path:
    """`{results_dir}/{task_type}_results{suffix}`; raises ConfigurationError for a type that is not a file name
    part.
    """
    check_file_name_part(task_type, "the task type")
    return results_dir / f"{task_type}_results{suffix}"


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a results file.

    Raises:
        ResultsError: not there, torn, or no JSON object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ResultsRefused(f"{path} contains no JSON object; move it away, it is not a results file")
    return content


def read_json(path: Path, advice: str = "repair it or move it away, it is left as it is") -> Any:
    """The content of a JSON file, of which every number is finite.

    Args:
        advice: what to do about a file that cannot be read.

    Raises:
        ResultsError: not there.
        ResultsRefused: not a regular file, torn, not UTF-8, nested too deep, or with a number that is not finite, of
            which it names the place.
    """
    try:
        return parsed_json(read_regular_file(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        kind = ResultsError if isinstance(error, FileNotFoundError) else ResultsRefused
        raise kind(f"{path} cannot be read ({reason}); {advice}") from error


def parsed_json(data: bytes) -> Any:
    """What a JSON text contains; raises ValueError, also for NaN, infinities and what is nested more than 200 deep."""
    try:
        content = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "recursion" in str(error):
            raise ValueError(_TOO_DEEP) from error
        # The slower reader takes half surrogate pairs, and NaN, whose place is reported below.
        try:
            content = json.loads(data.decode("utf-8"))
        except RecursionError:
            raise ValueError(_TOO_DEEP) from error
    else:
        zeros = data.translate(_AS_ZEROS)
        if _MANY_DIGITS not in zeros and not _LARGE_EXPONENT.search(zeros):
            return content
    for place, value in _numbers(content, "", 200):
        if not math.isfinite(value):
            raise ValueError(f"{place} is {value}, and numbers are finite")
    return content


def _numbers(content: Any, place: str, levels_left: int) -> Iterator[tuple[str, float]]:
    if isinstance(content, float):
        yield place or "it", content
    elif isinstance(content, dict | list) and levels_left == 0:
        raise ValueError(_TOO_DEEP)
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _numbers(value, f"{place}.{key}" if place else str(key), levels_left - 1)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from _numbers(value, f"{place}[{index}]", levels_left - 1)


def read_versioned_object(path: Path, what: str, version: int) -> dict[str, Any]:
    """The object in a file of one schema.

    Args:
        what: it is, for the message: "an energy file".

    Raises:
        ResultsError: as `read_json`, or of another schema.
    """
    content = read_json(path, "remove it or measure again")
    found = content.get("schema_version") if isinstance(content, dict) else None
    check_schema(found, version, f"{path} is not {what}", "read it with the version that wrote it, or move it away")
    return dict(content)


def read_object_of_kind(path: Path, kind: str, version: int, advice: str) -> dict[str, Any]:
    """The object in a file that names its kind and its schema; raises ResultsError as `read_json`, or for any other."""
    content = read_json(path, advice)
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise ResultsRefused(f"{path} is not a {kind} (it has kind {shortened(found)}); {advice}")
    check_schema(content.get("schema_version"), version, f"{path} is not a {kind}", advice)
    return dict(content)


def content_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of all keys but `digest`, as JSON of sorted keys without spaces."""
    others = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_schema(found: object, version: int, fault: str, advice: str) -> None:
    """Raises ResultsRefused unless the schema that a file names, None for none, is that of this version.

    Args:
        fault: begins the message: "FILE is not an energy file".
    """
    if type(found) is not int or found != version:
        raise OtherVersion(f"{fault} of schema {version} (its schema is {shortened(found)}); {advice}")


def field_fault(error: ValidationError) -> str:
    """A validation's first error as the end of a sentence that began with the file's name."""
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        above, _, key = field.rpartition(".")
        return f"lacks {key!r}{f' in {above}' if above else ''}: it is broken or something else"
    if first["type"] == "string_pattern_mismatch":
        return (
            f"is broken: {field} is {shortened(first['input'])}, and it is part of file names: letters, digits, - and "
            "_ only, 100 at most"
        )
    rule = first["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "it should be", 1)
    if first["type"] in ("model_type", "dict_type"):
        rule = "it should be an object"
    return f"is broken: {field} is {shortened(first['input'])}, and {rule}"


def read_experiments(path: Path) -> dict[str, dict[str, Any]]:
    """The experiments that a file of many contains, by name; empty where there is no file yet.

    Raises:
        ResultsError: torn, or something else than a dict of dicts.
    """
    if not path.exists():
        return {}
    content = read_json_object(path)
    wrong = next((name for name, each in content.items() if not isinstance(each, Mapping)), None)
    if wrong is not None:
        raise ResultsRefused(
            f"{path} contains {wrong!r}, which is not an experiment; move the file away, it is left as it is"
        )
    return content


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """What a JSON file contains as rows of a table: many experiments by name, a list of them, or a single one.

    Raises:
        ResultsError: not there, torn, or neither of these.
    """
    content = read_json(path)
    if isinstance(content, list) and all(isinstance(each, Mapping) for each in content):
        return content
    if not isinstance(content, Mapping):
        raise ResultsRefused(f"{path} contains neither a dict nor a list of dicts; give a results file")
    return [content] if _is_one_experiment(content) else named_rows(content)


def _is_one_experiment(content: Mapping[str, Any]) -> bool:
    types = all(key in PRIORITIES or _OF_ONE_PROCESS.fullmatch(key) for key in content)
    return bool(content) and (types or not all(isinstance(each, Mapping) for each in content.values()))
