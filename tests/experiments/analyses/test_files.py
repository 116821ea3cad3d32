"""The files of an analysis: every content and figure, every table that has rows."""

import json
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ResultsNotSaved
from experiments.analyses.charts.chart import Axis, Chart, Line, Panel
from experiments.analyses.files import AnalysisFiles, json_text

ROWS = [{"stage": "vision", "ms": 1.5}, {"stage": "decode", "ms": None}]


def test_each_part_has_its_files_and_an_empty_table_none(tmp_path: Path) -> None:
    chart = Chart("lines", [Panel("title", Axis("x"), Axis("y"), [Line([0, 1], [0, 1], "#0072B2")])])
    files = AnalysisFiles({"shares": {"n": 2}}, {"rows": ROWS, "nothing": []}, [chart], "n = 2")
    written = files.write(tmp_path / "analysis")
    assert [path.name for path in written] == ["shares.json", "rows.csv", "lines.png", "lines.svg"]
    assert sorted(written) == sorted((tmp_path / "analysis").iterdir())
    assert json.loads(written[0].read_text()) == {"n": 2}
    assert written[1].read_text().split() == ["stage,ms", "vision,1.5", "decode,"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsNotSaved):
        AnalysisFiles({"shares": {}}, {}, [], "").write(tmp_path / "file")


def test_each_item_of_a_list_has_a_line() -> None:
    content = {"n": 2, "rows": ROWS, "none": []}
    assert json.loads(json_text(content)) == content and json.loads(json_text({})) == {}
    assert json_text({"rows": ROWS}).splitlines()[2:4] == [
        '  {"stage": "vision", "ms": 1.5},',
        '  {"stage": "decode", "ms": null}',
    ]
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"ms": float("nan")})
