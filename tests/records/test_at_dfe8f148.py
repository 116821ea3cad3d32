"""Results of commit dfe8f148: what is filled in by hand, and that every reader of results takes them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ResultsRefused
from experiment_core_utils.records.setting_result import SettingResult
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.stages.analysis import analyse_stages
from experiments.analyses.sweeps import load_sweep, samples_frame
from experiments.core_exp import compare_runs

STORED = Path(__file__).parents[1] / "data" / "at_dfe8f148" / "knobs"


def content_of(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((STORED / name).read_text())
    return content


def test_intervals_are_those_of_positive_quantities_and_times_the_means_of_all_runs() -> None:
    content = content_of("reference-mixed_imgsizeown_topk8_blocks16.json")
    content["aggregate_stats"] |= {"T_total_mean": 100.0, "T_total_ci95_low": -20.0, "T_total_ci95_high": 220.0}
    content["energy"]["passes"] |= {"j_per_request": 4.0, "j_per_request_ci95_low": 2.0, "j_per_request_ci95_high": 6.0}
    sample = content["per_sample_results"][0]
    (run,) = sample["runs"]
    sample["runs"].append({**run, "T_vision_total": run["T_vision_total"] + 2.0, "T_total": run["T_total"] + 2.0})
    found = SettingResult.from_content(content, "a.json")
    # 100 * exp(-/+ 120 / 100), and 4 * exp(-/+ 2 / 4).
    ends = [found.aggregate_stats[f"T_total_ci95_{end}"] for end in ("low", "high")]
    assert ends == [pytest.approx(30.1194), pytest.approx(332.0117)]
    assert found.energy is not None and found.energy.passes is not None
    assert found.energy.passes.j_per_request_ci95_low == pytest.approx(2.426123)
    assert found.energy.passes.j_per_request_ci95_high == pytest.approx(6.594885)
    assert found.per_sample_results[0].T_total == pytest.approx(run["T_total"] + 1.0)
    # Once filled in it is a result of today, which is left as it is.
    assert SettingResult.from_content(found.content(), "a.json") == found


def test_what_is_older_is_refused() -> None:
    content = content_of("reference-mixed_imgsizeown_topk8_blocks16.json")
    for key in ("protocol_version", "is_reference", "metric"):
        with pytest.raises(ResultsRefused, match=f"lacks '{key}'"):
            SettingResult.from_content({name: each for name, each in content.items() if name != key}, "a.json")


def test_report_comparison_and_stages_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in STORED.glob("*own_topk8*.json"):
        shutil.copy(path, tmp_path)
    found = analyse([tmp_path])
    assert [len(each.sweep.settings) for each in found.sweeps] == [2] and report_of(found).title
    sweep = load_sweep(tmp_path)
    assert analyse_stages(sweep, samples_frame(sweep)) is not None
    assert compare_runs.main([str(tmp_path), str(tmp_path)]) == 0
    assert "A and B are the same measurement" in capsys.readouterr().out
