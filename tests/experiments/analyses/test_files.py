"""The files of an analysis: every content and figure, every table that has rows."""

import json
from pathlib import Path

import pytest

from experiment_core_utils.primitives.errors import ResultsNotSaved
from experiments.analyses.charts.style import new_figure
from experiments.analyses.files import AnalysisFiles

ROWS = [{"stage": "vision", "ms": 1.5}, {"stage": "decode", "ms": None}]


def test_each_part_has_its_files_and_an_empty_table_none(tmp_path: Path) -> None:
    files = AnalysisFiles({"shares": {"n": 2}}, {"rows": ROWS, "nothing": []}, {"bars": new_figure(2, 1, "n = 2")})
    written = files.write(tmp_path / "analysis")
    assert [path.name for path in written] == ["shares.json", "rows.csv", "bars.png", "bars.svg"]
    assert sorted(written) == sorted((tmp_path / "analysis").iterdir())
    assert json.loads(written[0].read_text()) == {"n": 2}
    assert written[1].read_text().split() == ["stage,ms", "vision,1.5", "decode,"]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsNotSaved):
        AnalysisFiles({"shares": {}}, {}, {}).write(tmp_path / "file")
