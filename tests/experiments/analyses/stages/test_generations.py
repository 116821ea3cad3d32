"""The times of each measured sample, and what names its picture and its vision knob."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.stages.analysis import generations_of
from experiments.analyses.stages.fractions import Generation
from experiments.analyses.sweeps import load_sweep
from tests.experiments.hand_made_sweep import result, setting, write
from tests.hand_made_records import answered_sample, measured_sample, staged_run

# Two steps of 0.4375 s, of 0.125 s and of 0.25 s: 0.8125 s in three runs; the last has one more.
RUNS = [staged_run(inter_token_s=gaps) for gaps in ((0.4375, 0.4375), (0.125, 0.125), (0.25, 0.25, 0.75))]


def generations(folder: Path, content: dict[str, Any]) -> list[Generation]:
    return generations_of(load_sweep(write(folder, content)))


def test_times_are_the_means_of_the_runs(tmp_path: Path) -> None:
    samples = [measured_sample(3, *RUNS, image_id="p"), answered_sample(4)]
    (found,) = generations(tmp_path, result(setting(top_k=4), samples))
    assert (found.task, found.setting, found.vision) == ("signs", "tier-low_topk4_blocks3", "low")
    assert found.levels == {"vision": "low", "top_k": 4, "num_active_blocks": 3} and found.picture == ("signs", "p")
    assert (found.image_features, found.prompt_tokens) == (432, 384 + 28 + 10)
    assert (found.vision_ms, found.prefill_ms) == (500.0, 250.0)
    assert found.inter_token_ms == pytest.approx((812.5 / 3, 812.5 / 3, 250.0))
    assert found.total_ms == pytest.approx(750.0 + (875 + 250 + 1250) / 3)


def test_a_question_without_a_picture_and_a_token_target_have_their_labels(tmp_path: Path) -> None:
    content = result(setting(), [measured_sample(0, has_picture=False), measured_sample(1)])
    content |= {"tier": None, "vision_tokens_target": 1008}
    found = [(each.vision, each.vision_ms) for each in generations(tmp_path, content)]
    assert found == [("no picture", None), ("1008 tokens", 500.0)]


def test_a_model_whose_vision_tokens_cannot_be_set_has_its_own_number(tmp_path: Path) -> None:
    content = result(setting(), [measured_sample(0)]) | {"tier": None, "vision_tokens_target": None}
    assert [each.vision for each in generations(tmp_path, content)] == ["own"]


def test_a_file_without_the_published_run_is_named(tmp_path: Path) -> None:
    content = result(setting(), [measured_sample(0)])
    content["per_sample_results"][0]["runs"][0]["T_total"] += 1
    with pytest.raises(ResultsError, match=r"blocks3\.json is broken: .*T_total is .* measure the setting again"):
        generations(tmp_path, content)
