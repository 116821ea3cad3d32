"""The file of a full grid as a small table: scores and times, settings by samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.primitives.files import read_regular_file


@dataclass(frozen=True)
class RecordedTable:
    """The scores and times of a full run.

    Attributes:
        pictures: of each sample.
        scores, seconds, costs: [settings, samples]; seconds and costs are nan where a sample failed, scores also where
            the metric has none. `costs` is the time of all measured runs together.
        best: the metric's highest score.
        origin: where it was measured and what its times are not.
    """

    settings: tuple[str, ...]
    sample_ids: tuple[int, ...]
    pictures: tuple[str, ...]
    scores: np.ndarray
    seconds: np.ndarray
    costs: np.ndarray
    best: float
    origin: Mapping[str, Any]


def read_table(path: Path) -> RecordedTable:
    """The table that `write_table` wrote; raises ResultsError for any other file."""
    try:
        content = json.loads(read_regular_file(path))
        rows = content["settings"]
        scores = _array([row["scores"] for row in rows.values()])
        seconds = _array([row["milliseconds"] for row in rows.values()]) / 1000
        costs = _array([row["cost_milliseconds"] or row["milliseconds"] for row in rows.values()]) / 1000
        ids, pictures = tuple(content["sample_ids"]), tuple(content["pictures"])
        return RecordedTable(tuple(rows), ids, pictures, scores, seconds, costs, content["best"], content["origin"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ResultsError(f"{path} is not a table of --collect ({error}); give one that it wrote") from error


def _array(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([[np.nan if each is None else each for each in row] for row in rows], dtype=float)
