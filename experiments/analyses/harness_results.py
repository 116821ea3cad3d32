"""The results of lm-eval and lmms-eval as their `--log_samples` writes them: what each question was, got and scored.

Read for the layouts: as of `saved_results.harness_layout`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiment_core_utils.primitives.errors import ResultsError, ResultsRefused
from experiment_core_utils.primitives.files import read_regular_file
from experiment_core_utils.records.result_files import RESULT_FILES, parsed_json, read_json_object
from experiment_core_utils.saved_results.harness_layout import OWN_KEY, SAMPLES_DIGEST, Harness

# Of each layout, its results file by pattern, and the file of a task's samples by the date in that name.
_RESULTS: Mapping[Harness, str] = {"lm-eval": "results_*.json", "lmms-eval": "*_results.json"}
_SAMPLES: Mapping[Harness, str] = {"lm-eval": "samples_{task}_{date}.jsonl", "lmms-eval": "{date}_samples_{task}.jsonl"}
_ADVICE = "give a folder or a results file of lm-eval or lmms-eval"


@dataclass(frozen=True)
class HarnessRow:
    """A question with one answer and its scores."""

    doc_id: int  #: its place in the task's split
    doc_hash: str | None  #: digest of the task's row; None where the file has none
    texts: tuple[str, ...]  #: every text of the task's row; the prompt where the file has no row
    prompt: str
    target: str
    response: str
    scores: Mapping[str, float]  #: by metric and filter, such as `exact_match,none`; only numbers

    @property
    def question(self) -> str:
        """What two files of one harness know it by."""
        return self.prompt if self.doc_hash is None else self.doc_hash


@dataclass(frozen=True)
class HarnessTask:
    """A task with the rows of its samples, in their order."""

    name: str
    rows: tuple[HarnessRow, ...]
    figures: Mapping[str, float]  #: by metric and filter, as the results file has them
    lower_is_better: frozenset[str]  #: metrics
    setting: str | None = None  #: key of an exported one beside others; None where there are no others


@dataclass(frozen=True)
class HarnessResults:
    """A results file with its samples."""

    path: Path
    layout: Harness
    model: str
    tasks: tuple[HarnessTask, ...]
    voided_by: tuple[str, ...]  #: why an exported run is INVALID, a sentence each
    is_exported: bool = False  #: whether it is a run of this project in that layout

    @property
    def label(self) -> str:
        """Model and harness."""
        return f"{self.model} ({self.layout})"


def harness_files(path: Path) -> list[tuple[Path, Harness]]:
    """The results file that a path is, or those that its folder or the folders in that contain; none of results of
    this project.

    Raises:
        ResultsRefused: a file with another name.
    """
    if path.is_file():
        layout = next((layout for layout, form in _RESULTS.items() if path.match(form)), None)
        if layout is None:
            raise ResultsRefused(
                f"{path} is not named as results are (results_DATE.json, DATE_results.json); {_ADVICE}"
            )
        return [(path, layout)]
    if not path.is_dir() or any(path.glob(RESULT_FILES)):
        return []
    return _files_in(path) or [file for inner in sorted(path.iterdir()) if inner.is_dir() for file in _files_in(inner)]


def _files_in(folder: Path) -> list[tuple[Path, Harness]]:
    return [(file, layout) for layout, form in _RESULTS.items() for file in sorted(folder.glob(form))]


def read_harness(folder: Path, files: Sequence[tuple[Path, Harness]]) -> HarnessResults:
    """Results files and the samples beside them; several are the exported settings of one run.

    Args:
        folder: that they were found in.

    Raises:
        ResultsError: no samples, torn or other files, or several that are not of the settings of one run.
    """
    contents = [read_json_object(path) for path, _ in files]
    runs, settings = (
        [" ".join(dict.fromkeys(str(own[key]) for own in _ours(each) if key in own)) or None for each in contents]
        for key in ("fingerprint", "setting")
    )
    if len(files) == 1:
        return _read_file(*files[0], contents[0])
    if len(set(runs)) > 1 or None in runs or len(set(settings)) < len(settings):
        names = ", ".join(str(file.relative_to(folder)) for file, _ in files[:3])
        raise ResultsError(
            f"{folder} contains {len(files)} results files ({names} ...), not one for each exported setting of a run; "
            "give one of them"
        )
    found = [_read_file(*each, content) for each, content in zip(files, contents, strict=True)]
    tasks = [replace(task, setting=key) for each, key in zip(found, settings, strict=True) for task in each.tasks]
    voided = dict.fromkeys(sentence for each in found for sentence in each.voided_by)
    model = found[0].model.removesuffix(f"/{settings[0]}")
    return replace(found[0], path=folder, model=model, tasks=tuple(tasks), voided_by=tuple(voided))


def _ours(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What an exported run says of each task; empty for results of a harness."""
    return [each for each in _object_of(content, OWN_KEY).values() if isinstance(each, Mapping)]


def _read_file(path: Path, layout: Harness, content: Mapping[str, Any]) -> HarnessResults:
    """A results file with the samples beside it."""
    results = content.get("results")
    if not isinstance(results, Mapping) or not all(isinstance(each, Mapping) for each in results.values()):
        raise ResultsRefused(f"{path} has no object of tasks under 'results'; {_ADVICE}")
    stem = path.stem
    date = stem.removeprefix("results_") if layout == "lm-eval" else stem.removesuffix("_results")
    better = _object_of(content, "higher_is_better")
    tasks = []
    for name, figures in results.items():
        samples = path.with_name(_SAMPLES[layout].format(task=name, date=date))
        if not samples.is_file():
            # A group has figures and no samples of its own.
            continue
        digest = _object_of(_object_of(content, OWN_KEY), name).get(SAMPLES_DIGEST)
        if digest is not None and hashlib.sha256(read_regular_file(samples)).hexdigest() != digest:
            raise ResultsRefused(f"{samples} was EDITED: its digest is that of another content; export the run again")
        numbers = {key: float(each) for key, each in figures.items() if "," in key and isinstance(each, int | float)}
        metrics = dict.fromkeys(key for key in numbers if "_stderr" not in key)
        rows = tuple(row for row in (_row(*each, metrics) for each in _lines(samples)) if row is not None)
        lower = frozenset(key for key, each in _object_of(better, name).items() if each is False)
        tasks.append(HarnessTask(name, rows, numbers, lower))
    if not any(task.rows for task in tasks):
        raise ResultsError(f"{path} has no samples beside it (samples_*.jsonl); run the harness with --log_samples")
    voided = [str(each) for own in _ours(content) for each in own.get("voided_by", ())]
    model = str(content.get("model_name") or path.parent.name)
    is_exported = any("setting" in own for own in _ours(content))
    return HarnessResults(path, layout, model, tuple(tasks), tuple(dict.fromkeys(voided)), is_exported)


def _object_of(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key)
    return found if isinstance(found, Mapping) else {}


def _lines(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Each line of a JSON-lines file, with the place that messages name."""
    found = []
    for number, line in enumerate(read_regular_file(path).splitlines(), 1):
        try:
            content = parsed_json(line)
        except ValueError as error:
            raise ResultsRefused(f"{path} line {number} is no JSON ({error}); run the harness again") from error
        if not isinstance(content, Mapping) or "doc_id" not in content:
            raise ResultsRefused(
                f"{path} line {number} is no sample of lm-eval or lmms-eval: it has no doc_id; {_ADVICE}"
            )
        found.append((f"{path} line {number}", content))
    return found


def _row(place: str, content: Mapping[str, Any], metrics: Mapping[str, Any]) -> HarnessRow | None:
    """A line as a row; its filter is that of one of the metrics, which lmms-eval does not name in it."""
    kept_by = content.get("filter")
    scores = {}
    for key in metrics:
        name, _, of_filter = key.partition(",")
        value = content.get(name)
        if kept_by in (None, of_filter) and isinstance(value, int | float):
            scores[key] = float(value)
    # As lm-eval writes it.
    argument = _object_of(_object_of(content, "arguments"), "gen_args_0").get("arg_0", "")
    asked = content.get("input", argument)
    doc_id = content["doc_id"]
    if not isinstance(doc_id, int):
        raise ResultsRefused(f"{place}: doc_id is {doc_id!r}, and it is a number; {_ADVICE}")
    prompt = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
    response = _first(content.get("filtered_resps"))
    digest = content.get("doc_hash")
    return HarnessRow(
        doc_id,
        digest if isinstance(digest, str) else None,
        tuple(_texts_in(content["doc"])) if "doc" in content else (prompt,),
        prompt,
        str(content.get("target", "")),
        response if isinstance(response, str) else json.dumps(response, ensure_ascii=False),
        scores,
    )


def _first(value: Any) -> Any:
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    return value


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _texts_in(each)]
