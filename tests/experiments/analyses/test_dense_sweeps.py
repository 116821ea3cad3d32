"""A dense model's results, where top-k is null and the number of vision tokens may be the model's own."""

import json
from pathlib import Path

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target
from experiments.analyses.latency.estimator import caveats_of
from experiments.analyses.latency.features import timed_samples
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of
from experiments.analyses.sweeps import load_sweep, samples_frame, settings_frame
from experiments.core_exp import e1_stage_latency, e2_knob_pareto, report
from tests.experiments.hand_made_sweep import result, write


@pytest.fixture(params=["tiers", "own tokens"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    targets = [tier_target("low"), tier_target("high")] if request.param == "tiers" else [own_target()]
    settings = [
        Setting.of(vision=target, top_k=None, num_active_blocks=RunningBlocks.of(tuple(range(blocks))))
        for target in targets
        for blocks in (3, 4)
    ]
    return write(tmp_path / "run", *(result(each) for each in settings))


def test_top_k_is_absent_in_the_frames(folder: Path) -> None:
    sweep = load_sweep(folder)
    assert settings_frame(sweep)["top_k"].isna().all()
    assert samples_frame(sweep)["top_k"].isna().all()
    assert sorted(set(settings_frame(sweep)["num_active_blocks"])) == [3, 4]


def test_stages_and_fronts_of_a_model_without_experts(folder: Path) -> None:
    assert e1_stage_latency.main([str(folder)]) == 0
    assert e2_knob_pareto.main([str(folder), "--num_draws", "100"]) == 0
    grid = json.loads((folder / "analysis" / "e2_knob_grid_results.json").read_text())
    points = grid["tasks"][0]["settings"]
    assert {point["top_k"] for point in points} == {None}
    breakdown = json.loads((folder / "analysis" / "e1_stage_latency_breakdown.json").read_text())
    # 0.5 s vision, 0.25 s prefill and 0.25 s decode in every sample.
    assert all(each["stages"]["vision"]["share"] == pytest.approx(0.5) for each in breakdown["settings"])


def test_the_estimator_does_not_miss_a_knob_that_the_model_lacks(folder: Path) -> None:
    caveats = [each.sentence for each in caveats_of(timed_samples(samples_frame(load_sweep(folder))))]
    assert not [each for each in caveats if each.startswith("top_k")]
    assert [each for each in caveats if each.startswith("crops had one value (2)")]


def test_a_report_of_a_model_without_experts(folder: Path) -> None:
    page = folder / "page.html"
    assert report.main([str(folder), "--output", str(page)]) == 0
    text = page.read_text()
    assert "nan tokens" not in text
    labels = [column.label for column in report_of(analyse([folder])).settings.columns]
    assert "blocks" in labels and "top-k" not in labels
