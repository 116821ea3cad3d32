"""A run's settings in a tracker, read back by the tracker's own library."""

from pathlib import Path

import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.saved_results.trackers import PROJECT, check_tracker, log_settings
from tests.hand_made_records import measured_sample, part, result_of, staged_run


def test_each_setting_is_a_step_in_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    # 0.25 s of prefill, 0.25 s of decode, and vision.
    results = [
        result_of(
            part(measured_sample(0, staged_run(vision_s=vision_s)), measured_sample(1, staged_run(vision_s=vision_s))),
            Setting.of(vision=tier_target(tier), top_k=2, num_active_blocks=RunningBlocks.of((0, 1))),
        )
        for tier, vision_s in (("low", 0.5), ("high", 1.5))
    ]
    results = [each.with_keys(provenance=each.provenance.with_keys(experiment_id="0007")) for each in results]
    check_tracker("tensorboard")
    log_settings(results, "tensorboard", tmp_path, "take tier-low")
    found = accumulator.EventAccumulator(str(tmp_path / "trackers" / PROJECT)).Reload()
    times = [(event.step, event.value) for event in found.Scalars("T_total_mean_ms")]
    assert times == [(0, pytest.approx(1000.0)), (1, pytest.approx(2000.0))]
    (hyperparameters,) = (tmp_path / "trackers" / PROJECT).rglob("hparams.yml")
    assert "setting_1: tier-high_topk2_blocks2" in hyperparameters.read_text()
    assert "conclusion: take tier-low" in hyperparameters.read_text()
    assert "task: signs" in hyperparameters.read_text() and "experiment_id: '0007'" in hyperparameters.read_text()


def test_a_tracker_that_is_not_installed_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="--tracker aim: its package is not installed"):
        check_tracker("aim")
