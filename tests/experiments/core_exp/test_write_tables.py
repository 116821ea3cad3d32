"""The tables of a folder that is there already."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.core_exp.write_tables import main
from tests.experiments.hand_made_sweep import PROVENANCE, result, setting, write


def test_each_task_gets_both_tables_of_all_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "signs", result(setting("high")), result(setting("low")))
    write(tmp_path / "counts", result(setting(), task=PROVENANCE["task"] | {"name": "count_it"}, fingerprint="beef"))
    assert main([str(tmp_path)]) == 0
    names = [
        "counts/count-it_settings.csv",
        "counts/count-it_samples.csv",
        "signs/signs_settings.csv",
        "signs/signs_samples.csv",
    ]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    assert list(pd.read_csv(tmp_path / "signs" / "signs_settings.csv")["tier"]) == ["low", "high"]
    samples = pd.read_csv(tmp_path / "signs" / "signs_samples.csv")
    assert list(samples["sample_id"]) == [0, 1, 0, 1] and list(samples["T_total_ms"]) == [1000.0] * 4


def test_a_folder_without_results_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
