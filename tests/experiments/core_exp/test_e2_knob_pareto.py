"""E2 from files to files."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.core_exp.e2_knob_pareto import main
from tests.experiments.hand_made_sweep import FLOPS, PROVENANCE, result, setting, write
from tests.hand_made_records import answered_sample, measured_sample, staged_run

CONTENTS = ("e2_knob_grid_results", "e2_pareto_frontiers", "e2_coupling_analysis")


def run_of(folder: Path, right: dict[tuple[str, int], int], task: str = "signs", num: int = 10) -> Path:
    """Settings by tier and top-k, right on their first samples; vision takes 0.1 s, at `high` 0.5 s, plus top-k."""
    results = []
    for (tier, top_k), number in right.items():
        seconds = (0.5 if tier == "high" else 0.1) + top_k / 100
        samples = [
            measured_sample(
                each, staged_run(vision_s=seconds + each / 1000), prediction=str(float(each < number)), flops=FLOPS
            )
            for each in range(num)
        ]
        provenance = PROVENANCE["task"] | {"name": task}
        one = result(setting(tier, top_k), samples, fingerprint=task, task=provenance)
        order = {"how": "rounds", "seed": 0, "position": len(results), "num_settings": len(right)}
        results.append(one | {"setting_order": order})
    return write(folder, *results)


def read(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((folder / f"{name}.json").read_text()) for name in CONTENTS)


ALL = {("low", 1): 2, ("low", 2): 2, ("high", 1): 9, ("high", 2): 9}


def test_a_run_becomes_three_files_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_of(tmp_path, ALL)), "--num_draws", "200"]) == 0
    out = tmp_path / "analysis"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("conclusion: keep tier-high_topk1_blocks3 (the most accurate setting: 1.01 s a request")
    assert lines[-1] == f"{len(list(out.iterdir()))} files in {out} (--verbose lists them)" and len(lines) <= 10
    assert main([str(tmp_path), "--num_draws", "200", "--verbose"]) == 0
    assert {str(path) for path in out.iterdir()} < set(capsys.readouterr().out.splitlines())
    assert (out / "e2_coupling_signs.svg").exists() and (out / "e2_effects_signs.png").stat().st_size > 5000
    grid, fronts, coupling = read(out)
    by_cost = {each["cost"]: each for each in fronts["fronts"]}
    assert list(by_cost) == ["latency_mean", "latency_p95", "energy", "flops"]
    expected = ["tier-low_topk1_blocks3", "tier-high_topk1_blocks3"]
    assert by_cost["latency_p95"]["front"] == expected and by_cost["latency_mean"]["front"] == expected
    # 0.11 + 0.0045 + 0.25 + 0.25 s in the mean of ten, 0.51 at high.
    costs = {each["key"]: each["cost"] for each in by_cost["latency_mean"]["settings"]}
    assert [costs[key] for key in expected] == [pytest.approx(614.5), pytest.approx(1014.5)]
    assert by_cost["energy"]["front"] is None and "--energy" in by_cost["energy"]["reason"]
    (task,) = grid["tasks"]
    assert task["knobs"] == {"vision": ["low", "high"], "top_k": [1, 2], "num_active_blocks": [3]}
    shares = {tuple(term["knobs"]): term["share"] for term in task["effects"]["accuracy"]["terms"]}
    assert shares["vision",] == pytest.approx(1.0) and shares["top_k",] == pytest.approx(0.0)
    assert [each["accuracy"] for each in task["settings"]] == [0.2, 0.2, 0.9, 0.9]
    assert [each["energy_mean_j"] for each in task["settings"]] == [None] * 4
    assert {row["knob"] for row in coupling["couplings"][0]["fixed"]} == {"vision", "top_k"}
    assert fronts["tasks_compared"] == []
    assert any("P95 of end-to-end latency is based on 10 samples" in each for each in grid["caveats"])
    assert not any("one after another" in each for each in grid["caveats"])
    assert by_cost["latency_mean"]["setting_variance"] == {"std": 0.0, "degrees": None, "source": "rounds"}
    assert by_cost["latency_mean"]["ties"] == [[each["key"]] for each in by_cost["latency_mean"]["settings"]]
    with (out / "e2_fronts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # Four settings against three costs.
    assert len(rows) == 12 and rows[0]["setting"] == "tier-low_topk1_blocks3" and rows[0]["on_front"] == "true"


def test_tasks_from_two_folders_are_compared(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", {key: 2 * right for key, right in ALL.items()}, num=20)
    two = run_of(tmp_path / "two", dict.fromkeys(ALL, 10), task="counts", num=20)
    assert main([str(one), str(two), "--output_dir", str(tmp_path / "out"), "--num_draws", "200"]) == 0
    fronts = read(tmp_path / "out")[1]
    compared = {each["cost"]: each["settings"] for each in fronts["tasks_compared"]}
    (only,), (tail,) = compared["latency_mean"], compared["latency_p95"]
    assert only["key"] == tail["key"] == "tier-high_topk1_blocks3"
    # The same answers to twenty questions do not show that none is lost.
    assert only["statuses"] == {"counts": "possible", "signs": "established"}
    assert only["words"] == {"counts": "can't tell", "signs": "yes"}
    # A P95 of twenty pictures says nothing against another.
    assert tail["statuses"]["counts"] == "possible" and tail["difference"] == "within_noise"


def test_the_percentile_and_the_seed_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path, {("low", 1): 2})
    assert main([str(folder), "--percentile", "99", "--num_draws", "100", "--seed", "7"]) == 0
    grid, fronts, coupling = read(tmp_path / "analysis")
    assert (grid["seed"], grid["num_draws"]) == (7, 100)
    # One setting: a front of one, nothing that is fixed or split.
    assert capsys.readouterr().out.startswith("conclusion: no setting is named: one setting was measured; ")
    first = fronts["fronts"][1]
    assert (first["cost"], first["front"]) == ("latency_p99", ["tier-low_topk1_blocks3"])
    # 0.11 + 0.5 s and, of 0 to 9 ms, 99 % of the way.
    assert first["settings"][0]["cost"] == pytest.approx(618.91)
    assert coupling["couplings"][0]["fixed"] == []
    assert grid["tasks"][0]["effects"]["accuracy"]["reason"] == "one setting has no spread"
    assert not (tmp_path / "analysis" / "e2_coupling_signs.png").exists()


def test_settings_that_were_only_answered_have_no_front_against_latency(tmp_path: Path) -> None:
    batches = [answered_sample(each) for each in range(3)]
    folder = write(tmp_path, result(setting("low"), batches), result(setting("high"), batches))
    assert main([str(folder), "--num_draws", "100"]) == 0
    fronts = read(tmp_path / "analysis")[1]["fronts"]
    assert [each["front"] for each in fronts] == [None] * 4
    assert fronts[0]["reason"] == "no setting has a sample with a time: all were answered in batches"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--num_draws", "5"], 2, "--num_draws 5 is not possible; give at least 100"),
        (["--percentile", "50"], 2, "95"),
        ([], 1, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, words: str
) -> None:
    try:
        found = main([str(tmp_path / "nowhere"), *flags])
    except SystemExit as stopped:
        found = int(str(stopped.code))
    error = capsys.readouterr().err
    assert found == code and words in error and error.count("\n") == 1
