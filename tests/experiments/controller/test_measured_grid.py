"""A grid read from hand-made results: order, features, what is left out, and how it is parted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import own_target, tier_target, token_target
from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiment_core_utils.primitives.files import REPOSITORY
from experiments.controller.evaluation.replay import shares_of_reference
from experiments.controller.knob_choices import choice_of
from experiments.controller.lookup import main as lookup_command
from experiments.controller.measured_grid import load_grid, split_by_picture
from experiments.controller.policies.interface import PictureShape
from tests.experiments.controller.hand_made_requests import grid
from tests.experiments.hand_made_sweep import ARRIVED, reference, result, setting, write
from tests.hand_made_records import answered_sample, measured_sample, staged_run


def test_results_become_a_grid_in_order_of_the_knobs(tmp_path: Path):
    # 0.5 + 0.25 + 2 * 0.125 = 1 s; without vision 0.5 s.
    quick = measured_sample(1, staged_run(vision_s=0.0), prediction="0.5")
    write(
        tmp_path,
        result(setting("high", 2, 3)),
        result(setting("low", 2, 4)),
        result(setting("low", 2, 3), [measured_sample(0), quick]),
    )
    made = load_grid([tmp_path])
    assert made.choices == (choice_of("low", 2, 3), choice_of("low", 2, 4), choice_of("high", 2, 3))
    assert made.tasks == ("signs", "signs")
    assert made.sample_ids == (0, 1)
    assert made.pictures == ("picture-0", "picture-1")
    assert made.total_s.tolist() == [[1.0, 0.5], [1.0, 1.0], [1.0, 1.0]]
    assert made.scores.tolist() == [[1.0, 0.5], [1.0, 1.0], [1.0, 1.0]]
    assert made.metrics == {"signs": "read_off"}
    assert made.left_out == ()
    assert made.requests is not None
    first = made.requests[0]
    # Ten text tokens; 2 tiles and 384 features, the same at both tiers here.
    assert (first.task, first.sample_id, first.text_tokens) == ("signs", 0, 10)
    assert first.shapes == {"low": PictureShape(2, 384), "high": PictureShape(2, 384)}
    assert first.output_tokens is None


def test_a_grid_has_the_runs_of_every_sample(tmp_path: Path) -> None:
    """Runs of 1 s and 2 s of one sample, and one of 1 s of the other."""
    samples = [measured_sample(0, staged_run(), staged_run(vision_s=1.5)), measured_sample(1)]
    made = load_grid([write(tmp_path, result(setting("low"), samples), result(setting("high")))])
    assert made.runs_s is not None
    np.testing.assert_array_equal(made.runs_s[:, 0], [[1.0, 1.0], [2.0, np.nan]])
    np.testing.assert_array_equal(made.runs_s[:, 1], [[1.0, 1.0], [np.nan, np.nan]])
    assert made.total_s.tolist() == [[1.5, 1.0], [1.0, 1.0]]
    assert made.late(1.5).tolist() == [[0.5, 0.0], [0.0, 0.0]]


def test_settings_of_any_knobs_are_choices_in_order(tmp_path: Path) -> None:
    """A model of tiers and token targets, one of both and of experts, and one that has blocks alone."""
    three, four = (0, 1, 2), (0, 1, 2, 3)
    targets = [own_target(), token_target(300), tier_target("high"), token_target(288), tier_target("low")]
    settings = [
        Setting.of(vision=target, top_k=top_k, num_active_blocks=RunningBlocks.of(three))
        for target in targets
        for top_k in (4, None)
    ]
    write(
        tmp_path / "any",
        *(
            result(each)
            for each in [
                *settings,
                Setting.of(vision=own_target(), top_k=None, num_active_blocks=RunningBlocks.of(four)),
            ]
        ),
    )
    made = load_grid([tmp_path / "any"])
    # 288 and 300 tokens are one crop, low at most 3, high 15, the model's own number whatever it takes.
    visions = ("288 tokens", "300 tokens", "low", "high", "own")
    choices = [choice_of(vision, top_k, 3) for vision in visions for top_k in (None, 4)]
    assert made.choices == (*choices[:-1], choice_of("own", None, 4), choices[-1])
    assert made.choices[0].key == "tokens288_blocks3" and made.left_out == ()
    assert made.requests is not None and set(made.requests[0].shapes) == set(visions)
    part = made.with_all_knobs()
    assert part.choices == (choice_of("low", 4, 3), choice_of("high", 4, 3))
    assert part.scores.shape == part.total_s.shape == (2, 2)
    assert len(part.left_out) == 9
    write(
        tmp_path / "dense",
        result(Setting.of(vision=own_target(), top_k=None, num_active_blocks=RunningBlocks.of(three))),
    )
    with pytest.raises(ResultsError, match="such as own_blocks3; use a lookup table for such a model"):
        load_grid([tmp_path / "dense"]).with_all_knobs()


def test_the_reference_is_a_choice_and_what_shares_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 0.5 + 0.25 + 0.25 = 1 s; with 0.25 s of vision 0.75 s.
    own = [measured_sample(at, staged_run(vision_s=0.25)) for at in (0, 1)]
    write(tmp_path, result(setting("low", 2, 3)), reference(own), result(setting("high", 4, 4)))
    made = load_grid([tmp_path])
    assert [choice.level("vision") for choice in made.choices] == ["low", "high", "own"]
    assert made.reference == choice_of("own", 4, 4) and not made.reference_in_grid
    assert made.largest == choice_of("high", 4, 4) and made.reference_mean_s == 0.75
    assert shares_of_reference(made, (1.0,)) == (0.75,)
    # The two-stage controller cannot choose it; the shares stay the same.
    part = made.with_all_knobs()
    assert (len(made.unchosen), len(part.unchosen)) == (1, 1)
    assert part.landmarks == (choice_of("low", 2, 3), choice_of("high", 4, 4))
    assert shares_of_reference(part.take(np.array([1])), (0.5,)) == (0.375,)
    assert lookup_command(["build", str(tmp_path), "--output", str(tmp_path / "table.json")]) == 0
    assert capsys.readouterr().out.endswith("; the reference, the model as it is, takes 750.0 ms\n")
    assert lookup_command(["predict", str(tmp_path / "table.json"), "--budget_ms", "2000"]) == 0
    assert ": 100 % own_topk4_blocks4\n" in capsys.readouterr().out
    (tmp_path / "signs_imgsizeown_topk4_blocks4.json").unlink()
    assert load_grid([tmp_path]).reference is None
    assert lookup_command(["build", str(tmp_path), "--output", str(tmp_path / "table.json")]) == 0
    assert capsys.readouterr().out.endswith("; the reference was not measured\n")


def test_samples_without_times_have_none_in_the_grid(tmp_path: Path):
    write(tmp_path, result(setting("low", 2, 3), [measured_sample(0), answered_sample(1)]))
    made = load_grid([tmp_path])
    assert np.isnan(made.total_s).tolist() == [[False, True]]
    assert made.complete().sample_ids == (0,)


def test_a_caption_counts_the_requests_of_a_part():
    assert grid().caption == "hand-made  ·  n = 4 requests, 3 settings  ·  signs"
    assert grid().take(np.array([0, 2])).caption == "hand-made  ·  n = 2 requests, 3 settings  ·  signs"


def test_random_weights_are_refused(tmp_path: Path):
    write(tmp_path, result(setting("low", 2, 3), experimental_variables={"random_weights": True}))
    with pytest.raises(ResultsError, match="random weights"):
        load_grid([tmp_path])


def test_requests_that_waited_for_each_other_are_refused(tmp_path: Path):
    write(tmp_path, result(setting("low", 2, 3)) | ARRIVED)
    with pytest.raises(ResultsError, match="measure again without --request_rate"):
        load_grid([tmp_path])


def test_a_recorded_table_is_a_grid_without_features():
    made = load_grid([REPOSITORY / "docs" / "core_exp" / "pareto_table.json"])
    assert len(made.choices) == 3 * 4 * 5 + 1 and made.choices[-1] == made.reference
    assert made.total_s.shape == (61, 100)
    assert made.requests is None


def test_the_order_of_a_table_does_not_matter(tmp_path: Path):
    content = json.loads((REPOSITORY / "docs" / "core_exp" / "pareto_table.json").read_text())
    content["settings"] = dict(reversed(content["settings"].items()))
    (tmp_path / "table.json").write_text(json.dumps(content))
    reordered, made = load_grid([tmp_path / "table.json"]), load_grid([REPOSITORY / "docs/core_exp/pareto_table.json"])
    assert reordered.choices == made.choices
    assert made.choices[0] == choice_of("low", 1, 12) and made.choices[-2] == choice_of("high", 8, 16)
    np.testing.assert_array_equal(reordered.total_s, made.total_s)


def test_taking_requests_keeps_everything_together():
    some = grid().take(np.array([False, True, False, True]))
    assert some.sample_ids == (1, 3)
    assert some.pictures == ("signs b", "signs d")
    assert some.total_s.tolist() == [[0.1, 0.2], [0.2, 0.4], [0.5, 0.7]]
    assert some.requests is not None
    assert [each.sample_id for each in some.requests] == [1, 3]


def test_parts_have_no_picture_in_common():
    made = replace(grid(), pictures=("signs a", "signs a", "signs b", "signs c"))
    for seed in range(6):
        calibration, rest = split_by_picture(made, 0.34, seed)
        # round(0.34 * 3 pictures) = 1 of them.
        assert len(set(calibration.pictures)) == 1
        assert not set(calibration.pictures) & set(rest.pictures)
        assert len(calibration) + len(rest) == 4
    with pytest.raises(ResultsError, match="3 pictures cannot be split at 0.1"):
        split_by_picture(made, 0.1, 0)


@pytest.mark.parametrize("share", [-0.5, 0.0, 1.0, float("nan"), float("inf")])
def test_an_impossible_fraction_is_refused(share: float):
    """A negative one would cut the drawn pictures from behind."""
    with pytest.raises(
        ConfigurationError, match=f"--calibration_share {share:g} is not possible; give a fraction betw"
    ):
        split_by_picture(grid(), share, 0)


def test_tasks_that_ask_about_the_same_pictures_are_parted_together() -> None:
    """Two tasks; b is a picture of both."""
    made = replace(
        grid(),
        tasks=("signs", "signs", "words", "words"),
        pictures=("a", "b", "b", "c"),
    )
    for seed in range(5):
        calibration, rest = split_by_picture(made, 0.5, seed)
        assert not set(calibration.pictures) & set(rest.pictures)
        # One of the two of each task: of the second task's, b where the first task has it, or else c.
        assert sorted(calibration.tasks) == sorted(rest.tasks) == ["signs", "words"]


def test_a_lookup_is_built_from_a_folder_by_command(tmp_path: Path, capsys):
    write(tmp_path / "run", result(setting("low", 2, 3)), result(setting("high", 2, 3)))
    file = tmp_path / "lookup.json"
    assert lookup_command(["build", str(tmp_path / "run"), "--output", str(file)]) == 0
    assert lookup_command(["predict", str(file), "--budget_ms", "1000"]) == 0
    assert "is tier-low_topk2_blocks3, 1000 ms, accuracy 1.000 [" in capsys.readouterr().out
    assert lookup_command(["build", str(tmp_path / "nothing"), "--output", str(file)]) == 1
