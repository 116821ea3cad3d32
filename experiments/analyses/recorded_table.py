"""Scores and times of a full grid, settings by samples: from results to a small table, written and read again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file, write_text_atomically
from experiment_core_utils.records.setting_result import SettingResult, reference_of, setting_key


@dataclass(frozen=True)
class RecordedTable:
    """The scores and times of a full run."""

    settings: tuple[str, ...]
    sample_ids: tuple[int, ...]
    pictures: tuple[str, ...]  #: of each sample; one without a picture stands for itself
    #: scores, seconds, costs: [settings, samples]; seconds and costs are nan where a sample failed, scores also where
    #: the metric has none. `seconds` is the mean of the measured runs, `costs` the time of all together.
    scores: np.ndarray
    seconds: np.ndarray
    costs: np.ndarray
    best: float  #: the metric's highest score
    origin: Mapping[str, Any]  #: where it was measured, and what its times are not
    prompts: tuple[str, ...]  #: of each sample
    reference: str | None = None  #: the setting that is the model as it is; None where it was not measured
    reference_in_grid: bool = True  #: whether the requested values of the knobs make it
    runs: np.ndarray | None = None  #: [R, settings, samples] seconds of each run, nan where fewer; None if only one


def named_picture(sample_id: int, image_id: object) -> str:
    """The name of a sample's picture; a sample without one (None) stands for itself."""
    return f"sample {sample_id}" if image_id is None else str(image_id)


def table_of(results: Sequence[SettingResult]) -> RecordedTable:
    """The table of a run's results.

    Raises:
        ResultsError: they do not belong to one run, or their requests waited for each other, which a table cannot say.
    """
    if len({result.fingerprint for result in results}) != 1:
        raise ResultsError("these are results of several runs, or none; give those of one")
    if any(result.open_loop is not None for result in results):
        raise ResultsError("a table is of requests one by one; measure again without --request_rate")
    first = results[0]
    ids = tuple(first.sample_ids)
    place = {sample_id: at for at, sample_id in enumerate(ids)}
    pictures, prompts = [""] * len(ids), [""] * len(ids)
    scores = np.full((len(results), len(ids)), np.nan)
    most = max((len(sample.runs) for result in results for sample in result.per_sample_results), default=0)
    runs = np.full((max(most, 1), len(results), len(ids)), np.nan)
    for row, result in enumerate(results):
        for sample in result.per_sample_results:
            at = place[sample.sample_id]
            pictures[at] = named_picture(sample.sample_id, sample.metadata.image_id)
            prompts[at] = sample.metadata.prompt or sample.metadata.question
            scores[row, at] = np.nan if sample.accuracy is None else sample.accuracy
            runs[: len(sample.runs), row, at] = np.array(sample.run_totals) / 1000
    provenance = first.provenance
    origin = {
        "model": Path(str(provenance.model.name)).name,
        "task": provenance.task.name,
        "split": provenance.task.split,
        "metric": first.metric,
        "hardware": provenance.hardware.content(),
        "versions": provenance.versions,
        "precision": provenance.experimental_variables.precision,
        "num_threads": provenance.experimental_variables.num_threads,
        "caveats": provenance.caveats,
        "protocol_version": first.protocol_version,
        "setting_order": None if first.setting_order is None else first.setting_order.how,
    }
    number = np.isfinite(runs).sum(axis=0)
    costs = np.where(number > 0, np.nansum(runs, axis=0), np.nan)
    keys = tuple(setting_key(result) for result in results)
    best = first.metric_best
    own = reference_of(results)
    return RecordedTable(
        keys, ids, tuple(pictures), scores, costs / np.maximum(number, 1), costs, best, origin, tuple(prompts),
        None if own is None else setting_key(own), own is None or own.in_grid, runs if most > 1 else None,
    )  # fmt: skip


def write_table(table: RecordedTable, path: Path) -> None:
    """One line a setting; milliseconds with one decimal, null where a sample failed; of each run, where it has more."""
    head = {"origin": table.origin, "best": table.best, "sample_ids": table.sample_ids, "pictures": table.pictures}
    head["prompts"] = table.prompts
    if table.reference is not None:
        head |= {"reference": table.reference, "reference_in_grid": table.reference_in_grid}
    has_one_run = np.array_equal(table.seconds, table.costs, equal_nan=True)
    lines = [
        json.dumps(key) + ": " + json.dumps(
            {
                "scores": [None if np.isnan(each) else round(float(each), 4) for each in table.scores[row]],
                "milliseconds": _milliseconds(table.seconds[row]),
                "cost_milliseconds": None if has_one_run else _milliseconds(table.costs[row]),
                **({} if table.runs is None else {"run_milliseconds": list(map(_milliseconds, table.runs[:, row]))}),
            },
            separators=(",", ":"),
        )
        for row, key in enumerate(table.settings)
    ]  # fmt: skip
    text = json.dumps(head, separators=(",", ":"))[:-1] + ',"settings":{\n' + ",\n".join(lines) + "\n}}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(text, path)


def _milliseconds(seconds: np.ndarray) -> list[float | None]:
    return [None if np.isnan(each) else round(1000 * float(each), 1) for each in seconds]


def read_table(path: Path) -> RecordedTable:
    """The table that `write_table` wrote; raises ResultsError for any other file."""
    try:
        content = json.loads(read_regular_file(path))
        rows = content["settings"]
        # What is absent, None, is nan.
        scores = np.array([row["scores"] for row in rows.values()], dtype=float)
        seconds = np.array([row["milliseconds"] for row in rows.values()], dtype=float) / 1000
        costs = np.array([row["cost_milliseconds"] or row["milliseconds"] for row in rows.values()], dtype=float) / 1000
        ids = tuple(content["sample_ids"])
        pictures = tuple(map(named_picture, ids, content["pictures"]))
        prompts = tuple(content["prompts"])
        runs = None
        if all("run_milliseconds" in row for row in rows.values()):
            runs = np.array([row["run_milliseconds"] for row in rows.values()], dtype=float).swapaxes(0, 1) / 1000
        return RecordedTable(
            tuple(rows), ids, pictures, scores, seconds, costs, content["best"], content["origin"], prompts,
            content.get("reference"), content.get("reference_in_grid", True), runs,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ResultsError(f"{path} is not a table of collect_table.py ({error}); give one that it wrote") from error
