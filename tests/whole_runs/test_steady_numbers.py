"""Whole runs: the order of settings, warm-ups, and samples until the mean is precise."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import pytest

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import ProfilingConfig, parse_config
from experiment_core_utils.meters.stability import shuffled
from experiment_core_utils.pipeline import measure_settings, run_profiling
from experiment_core_utils.planning.plan import RequestedRun, plan_for
from experiment_core_utils.records.ledger import Ledger
from experiment_core_utils.requests.drawing import draw_samples
from experiment_core_utils.tasks.datasets.reference_vqa import ReferenceVQA
from experiment_core_utils.tasks.interface import Sample
from tests.given_flags import over
from tests.processes.one_process import run_alone


def config_for(checkpoint: Path, folder: Path, *more: str) -> ProfilingConfig:
    return parse_config(
        over(["--model_path", str(checkpoint), "--output_dir", str(folder), "--num_samples", "2", "--tier_list", "low",
              "--top_k_list", "1", "2", "4", "--num_active_blocks_list", "4", "--num_runs_per_sample", "1",
              "--num_warmup_runs", "1", "--max_warmup_runs", "3", "--num_threads", "1",
              "--max_repeats", "0", "--no_reference", "--max_new_tokens", "2"], more)
    )  # fmt: skip


def test_settings_are_measured_shuffled_and_listed_as_planned(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(tiny_checkpoint, tmp_path, "--seed", "1")
    report = run_profiling(config)
    assert [result.top_k for result in report.results] == [1, 2, 4]
    assert report.csv_path is not None
    assert list(pd.read_csv(report.csv_path)["top_k"]) == [1, 2, 4]
    by_time = sorted(
        tmp_path.glob("*topk*.json"), key=lambda path: json.loads(path.read_text())["setting_order"]["position"]
    )
    order = shuffled((1, 2, 4), 1)
    assert order == (1, 4, 2)
    for position, (path, top_k) in enumerate(zip(by_time, order, strict=True)):
        result = json.loads(path.read_text())
        assert result["top_k"] == top_k
        assert result["setting_order"] == {"how": "rounds", "seed": 1, "position": position, "num_settings": 3}
        (warmup,) = result["warmup"]
        assert warmup["rank"] == 0
        assert warmup["num_runs"] == len(warmup["T_total"]) == 3
        assert warmup["is_stable"] == (warmup["spread_of_last_3"] <= 0.05)
    # One that is lost is measured again in its place.
    by_time[1].unlink()
    run_profiling(config)
    assert json.loads(by_time[1].read_text())["setting_order"]["position"] == 1


@dataclass
class CountingTask(ReferenceVQA):
    """The reference task, which breaks off after so many reads and remembers what was read."""

    breaks_after: int = 1000
    read: list[int] = field(default_factory=list)

    def __init__(self, breaks_after: int) -> None:
        super().__init__("validation")
        self.breaks_after, self.read = breaks_after, []

    def __getitem__(self, index: int) -> Sample:
        if len(self.read) == self.breaks_after:
            raise KeyboardInterrupt
        self.read.append(index)
        return super().__getitem__(index)


def measure(config: ProfilingConfig, breaks_after: int, experiment_id: str) -> CountingTask:
    """The settings of `config`, from wherever an earlier call left them."""
    source, task = find_model(config.model.model_path), CountingTask(breaks_after)
    ledger = Ledger(config.machine.output_dir, "f00d")
    drawn = draw_samples(task, config.task, may_stop_early=True)
    requested = RequestedRun(config, source, plan_for(config, source), task, drawn)
    run = run_alone(requested, ledger, experiment_id)
    measure_settings(run, [setting for setting in requested.settings if ledger.result(setting.key) is None])
    return task


def test_a_setting_ends_when_its_mean_is_precise_and_a_resumed_one_at_the_same_sample(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = config_for(tiny_checkpoint, tmp_path, "--until_precision", "0.99", "--num_samples", "14")
    config = config.replaced(top_k_list=(2, 4), num_warmup_runs=0)
    with pytest.raises(KeyboardInterrupt):
        measure(config, 4, "0001")
    measure(config, 1000, "0002")
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("*topk*.json")))
    assert first["provenance"]["experiment_ids"] == ["0001", "0002"]
    assert [warmup["experiment_id"] for warmup in first["warmup"]] == ["0001", "0002"]
    assert [entry["experiment_id"] for entry in first["conditions"]] == ["0001", "0002"]
    # The first run was broken off: it has an opening, no close. The other has both.
    assert [entry["num_readings"] for entry in first["conditions"]] == [1, 2]
    assert first["conditions"][0]["foreign_cpu_share"] is None
    assert 0.0 <= first["conditions"][1]["foreign_cpu_share"] <= 1.0
    assert first["conditions"][1]["gpu_reason"] == "no GPU is used"
    order = draw_samples(ReferenceVQA("validation"), config.task, may_stop_early=True).sample_ids
    assert len(order) == 14 and list(order) != sorted(order)
    for result in (first, second):
        assert result["num_samples"] == 10
        assert result["sample_ids"] == sorted(order[:10])
        assert [sample["sample_id"] for sample in result["per_sample_results"]] == sorted(order[:10])
        assert result["precision"]["stopped_by"] == "precision"
        assert result["precision"]["asked"] == 0.99
        assert 0 < result["precision"]["reached"] <= 0.99


def test_a_goal_out_of_reach_takes_every_sample(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = config_for(tiny_checkpoint, tmp_path, "--until_precision", "0.000001", "--num_samples", "12")
    (result,) = run_profiling(config.replaced(top_k_list=(4,), num_warmup_runs=0)).results
    assert result.num_samples == 12
    assert result.precision is not None and result.precision.stopped_by == "num_samples"
