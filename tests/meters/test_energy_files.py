"""Rows of an emissions file, added and read."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiment_core_utils.meters.energy_files import append_window, emissions_path, read_windows
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from tests.scripted.scripted_codecarbon import WINDOW


def test_each_window_is_a_row(tmp_path: Path) -> None:
    path = emissions_path("0001", tmp_path)
    assert path == tmp_path / "emissions_0001.csv"
    append_window(WINDOW, path)
    append_window(WINDOW | {"duration": 0.1, "further": "new"}, path)
    assert read_windows(path) == [WINDOW | {"further": None}, WINDOW | {"duration": 0.1, "further": "new"}]
    assert list(pd.read_csv(path)["cpu_energy"]) == [1e-4, 1e-4]
    assert [each.name for each in tmp_path.iterdir()] == ["emissions_0001.csv"]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "it lacks the column duration"),
        ("duration\n", "contains no measured window"),
        ("torn\n1,2\n", "row 2 has 2 cells"),
    ],
)
def test_an_unrelated_or_torn_file_is_one_line_and_stays(text: str, output: str, tmp_path: Path) -> None:
    path = emissions_path("0001", tmp_path)
    path.write_text(text)
    for act in (lambda: read_windows(path), lambda: append_window(WINDOW, path)):
        with pytest.raises(ResultsError, match=f"emissions_0001.csv.*{output}") as caught:
            act()
        assert "\n" not in str(caught.value)
    assert path.read_text() == text


@pytest.mark.parametrize("wrong", [None, "text", True])
def test_a_figure_that_is_no_number_is_named(wrong: Any, tmp_path: Path) -> None:
    path = emissions_path("0001", tmp_path)
    append_window(WINDOW | {"gpu_energy": wrong}, path)
    with pytest.raises(ResultsError, match="window 1: gpu_energy is .*, not a number"):
        read_windows(path)


def test_an_id_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="experiment id"):
        emissions_path("../1", tmp_path)
