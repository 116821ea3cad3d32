"""The command on a run's folder: its files, its words, its exit codes."""

import json
from pathlib import Path

import pandas as pd
import pytest

from experiment_core_utils.records.caveats import Caveat
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.core_exp.e3_latency_estimator import main
from tests.experiments.hand_made_sweep import FLOPS, result, setting, write
from tests.hand_made_records import measured_sample, staged_run


def sweep_folder(folder: Path, num_settings: int = 9) -> Path:
    """Settings with top-k 2, 3, 4 and 2, 3, 4 blocks: 40 ms a block in prefill, 10 ms a block for each token."""
    results = []
    for place in range(num_settings):
        top_k, blocks = 2 + place % 3, 2 + place // 3
        slower = [1 + 0.01 * sample for sample in range(5)]
        runs = [
            staged_run(0.1, 0.04 * blocks * each, (0.01 * blocks * each,) * (2 + number % 2))
            for number, each in enumerate(slower)
        ]
        samples = [measured_sample(number, run, flops=FLOPS) for number, run in enumerate(runs)]
        order = {"how": "shuffled", "seed": 42, "position": place, "num_settings": num_settings}
        results.append(result(setting("low", top_k, blocks), samples) | {"setting_order": order})
    return write(folder, *results)


def test_a_folder_becomes_a_model_a_validation_a_table_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep_folder(tmp_path)
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10 and lines[0].startswith(
        "The total time of a setting that was left out of the fit is predicted"
    )
    assert lines[-1] == f"9 files in {folder / 'analysis'} (--verbose lists them)"
    assert main([str(folder), "--verbose"]) == 0
    written = {path.name for path in (folder / "analysis").iterdir()}
    pictures = {
        f"e3_{name}.{kind}" for name in ("errors", "predicted_vs_measured", "guardrail") for kind in ("png", "svg")
    }
    assert written == pictures | {"e3_latency_estimator.json", "e3_validation.json", "e3_predictions.csv"}
    fitted = LatencyEstimator.load(folder / "analysis" / "e3_latency_estimator.json").fitted
    assert (fitted.num_settings, fitted.num_samples) == (9, 45)
    found = json.loads((folder / "analysis" / "e3_validation.json").read_text())
    # The runs of a setting are 40 ms x (1 to 1.04) a block: 1 % in the mean and nothing else is unknown.
    assert found["estimator"]["T_LLM_prefill"]["sample_mape"] == pytest.approx(0.012, abs=0.006)
    assert [each["reason"] is None for each in found["recalibrations"]] == [False]
    assert found["num_runs"] == 1 and "runs" not in found["left_out"]
    table = pd.read_csv(folder / "analysis" / "e3_predictions.csv")
    assert len(table) == 45 and table["T_total_predicted_ms"].notna().all()
    assert ((table["T_total_measured_ms"] / table["T_total_predicted_ms"] - 1).abs() < 0.1).all()
    printed = capsys.readouterr().out
    assert "9 settings, 45 samples" in printed and "crops had one value (2)" in printed


def test_of_an_invalid_run_that_is_said_first_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [sweep_folder(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        path = min(folder.glob("*.json"))
        content = json.loads(path.read_text())
        content["provenance"]["caveat_records"] = [Caveat.of("foreign_load_cpu", cpu_fraction=0.9).model_dump()]
        path.write_text(json.dumps(content))
    assert main([*map(str, folders)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("INVALID: background load: other processes used 90% of the CPUs")
    assert printed.count("INVALID") == 1


def test_several_runs_are_one_model_and_each_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(sweep_folder(tmp_path / name)) for name in ("one", "two")]
    assert main([*folders, folders[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    # The runs are equal, so that nothing but what differs between samples is unknown.
    assert " in 2 runs; a line of the same terms has " in lines[0]
    assert lines[1].startswith("The total time in a run that was left out is 1.")
    found = json.loads((tmp_path / "one" / "analysis" / "e3_validation.json").read_text())
    assert (found["num_runs"], found["num_samples"], found["recalibrations"]) == (2, 90, [])
    low, high = found["estimator"]["T_total"]["setting_mape_ci95"]
    assert low <= found["estimator"]["T_total"]["setting_mape"] <= high
    table = pd.read_csv(tmp_path / "one" / "analysis" / "e3_predictions.csv")
    assert table["run"].tolist() == [1] * 45 + [2] * 45
    other = sweep_folder(tmp_path / "other")
    for path in other.glob("*.json"):
        content = json.loads(path.read_text())
        content["provenance"]["hardware"] |= {"cpu": "another", "gpu_name": "another"}
        path.write_text(json.dumps(content))
    assert main([folders[0], str(other)]) == 2
    assert "give runs of one device, or the other as --target_dir" in capsys.readouterr().err


def test_a_run_that_is_too_small_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep_folder(tmp_path, 4))]) == 1
    assert capsys.readouterr().err.startswith("error: 4 settings with 20 samples are too few")
    assert not (tmp_path / "analysis").exists()
    assert main([str(tmp_path / "nowhere")]) == 1
    assert main([str(tmp_path), "--levl", "0.5"]) == 2


def test_a_target_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = sweep_folder(tmp_path / "one"), sweep_folder(tmp_path / "other")
    for path in target.glob("*.json"):
        content = json.loads(path.read_text())
        content["provenance"]["model"]["name"] = "another"
        path.write_text(json.dumps(content))
    assert main([str(source), "--target_dir", str(target)]) == 2
    assert "the target's results are of another, the source's of folder/tiny" in capsys.readouterr().err
