"""The recorded test vectors of a metric, as test parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data"
VECTORS: list[dict[str, Any]] = json.loads((DATA / "metric_vectors_text.json").read_text(encoding="utf-8"))


def vectors(metric: str) -> list[Any]:
    rows = [row for row in VECTORS if row["metric"] == metric]
    assert rows, f"no vectors of {metric}"
    return [pytest.param(row, id=row.get("case") or repr(row["prediction"])) for row in rows]
