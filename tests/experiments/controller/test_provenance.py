"""Grids, states and checkpoints of other models, splits and tasks: what is refused, what is a caveat."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.models.common.checkpoint_files import weights_digest
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.caveats import sentences
from experiments.controller.knob_choices import KnobSpace
from experiments.controller.measured_grid import load_grid
from experiments.controller.provenance import (
    knob_differences,
    refuse_other_controller,
    refuse_other_model,
    refuse_other_source,
    refuse_other_weights,
    task_caveats,
)
from tests.conftest import save_tiny, tiny_config
from tests.experiments.controller.hand_made_checkpoints import FITTING, checkpoint
from tests.experiments.controller.hand_made_requests import grid as hand_made
from tests.experiments.hand_made_sweep import result, setting, write


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Of the split `validation` of `signs`, with the model `folder/tiny`."""
    return write(tmp_path / "grid", result(setting()))


def source_and_config(model: Path, *flags: str):
    config = parse_config(["--model_path", str(model), "--device", "cpu", *flags])
    return config.model, find_model(config.model.model_path)


def test_the_same_split_and_model_in_another_place_are_taken(grid: Path) -> None:
    found = load_grid([grid])
    assert (found.model, found.splits) == ("folder/tiny", {"signs": "validation"})
    refuse_other_source(found, {"signs": "validation", "elsewhere": "test"}, "/other/place/tiny")
    refuse_other_source(found, {}, "tiny")
    # What does not say its model or split is not refused.
    refuse_other_source(replace(found, model=None, splits={}), {"signs": "train"}, "small")


@pytest.mark.parametrize(
    ("splits", "name", "states", "message"),
    [
        ({"signs": "train"}, "folder/tiny", None, "and train is read now; give --split validation"),
        ({"signs": "train"}, "folder/tiny", "a.pt", "split validation of signs, and train is in a.pt; give states of"),
        ({}, "folder/small", None, "model folder/tiny, and the states of folder/small; give the grid's as --model_p"),
        ({}, "folder/small", "a.pt", "and the states of folder/small; give other --states than a.pt"),
    ],
)
def test_another_split_and_another_model_are_refused(grid: Path, splits, name, states, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        refuse_other_source(load_grid([grid]), splits, name, states and Path(states))


def test_a_table_says_its_model_and_split_too(tmp_path: Path) -> None:
    origin = {
        "task": "signs", "split": "validation", "metric": "em", "model": "tiny",
        "hardware": {"gpu_name": None, "cpu": "Scripted CPU"},
    }  # fmt: skip
    row = {"scores": [1.0, 0.0], "milliseconds": [5.0, 6.0], "cost_milliseconds": [5.0, 6.0]}
    content = {"origin": origin, "best": 1.0, "sample_ids": [0, 1], "pictures": ["a", "b"],
               "prompts": [None, None], "settings": {"tier-low_topk2_blocks3": row}}  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps(content))
    found = load_grid([tmp_path / "table.json"])
    assert (found.model, found.splits) == ("tiny", {"signs": "validation"})


def test_a_live_evaluation_of_another_task_or_split_than_the_grids_is_a_caveat(grid: Path) -> None:
    found = load_grid([grid])
    assert sentences(task_caveats(found, "signs", "validation")) == []
    assert sentences(task_caveats(found, "signs", "test")) == [
        "the grid is of the split validation of signs, and test was measured"
    ]
    assert sentences(task_caveats(found, "words", "validation")) == ["the grid is of signs, and words was measured"]
    # A grid that does not tell its split.
    assert sentences(task_caveats(hand_made(), "signs", "test")) == []
    with pytest.raises(ConfigurationError, match="is of the model folder/tiny, and the answers are of small; give"):
        refuse_other_model(found, "small", "the answers are", "give another")


def test_a_controller_of_the_very_model_is_taken(tiny_checkpoint: Path, tmp_path: Path) -> None:
    digest = weights_digest(tiny_checkpoint)
    refuse_other_controller(
        checkpoint(tmp_path, name="elsewhere", weights_sha256=digest), *source_and_config(tiny_checkpoint)
    )
    refuse_other_controller(checkpoint(tmp_path, name="old"), *source_and_config(tiny_checkpoint))


@pytest.mark.parametrize(
    ("knobs", "width", "message"),
    [
        (FITTING, 16, "width 16 in place of 32; give"),
        (replace(FITTING, num_total_blocks=24, block_counts=(23, 24)), 32, "blocks 24 in place of 4"),
        (replace(FITTING, first_top_k=6), 32, "experts per token 6 in place of 4"),
        (replace(FITTING, top_ks=(2, 12)), 32, "top-k up to 12 of 8 experts"),
    ],
)
def test_a_controller_for_other_sizes_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, knobs: KnobSpace, width: int, message: str
) -> None:
    made = checkpoint(tmp_path, knobs, width, name="x", weights_sha256=weights_digest(tiny_checkpoint))
    for flags in ([], ["--random_weights"]):
        with pytest.raises(ConfigurationError, match=message) as caught:
            refuse_other_controller(made, *source_and_config(tiny_checkpoint, *flags))
        assert "\n" not in str(caught.value)


def test_a_controller_of_other_weights_of_the_same_sizes_is_refused_and_on_random_ones_taken(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    made = checkpoint(tmp_path, name="folder/small", weights_sha256="0" * 64)
    with pytest.raises(ConfigurationError, match="was trained with other weights, those of folder/small, than"):
        refuse_other_controller(made, *source_and_config(tiny_checkpoint))
    refuse_other_controller(made, *source_and_config(tiny_checkpoint, "--random_weights"))


def test_a_model_with_more_experts_is_distinguished(tmp_path: Path) -> None:
    """A controller that goes up to 12 experts, in a model of 12 and in one of 8 with the same number per token."""
    knobs = replace(FITTING, top_ks=(4, 12))
    made = checkpoint(tmp_path, knobs, name="x")
    refuse_other_controller(made, *source_and_config(save_tiny(tiny_config(num_experts=12), tmp_path / "twelve")))
    with pytest.raises(ConfigurationError, match="top-k up to 12 of 8 experts"):
        refuse_other_controller(made, *source_and_config(save_tiny(tiny_config(), tmp_path / "eight")))


def test_states_of_other_weights_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    path, states = checkpoint(tmp_path, name="folder/tiny", weights_sha256="one"), Path("states.pt")
    # A digest is of the weights wherever they lie; without one of both, names have to do.
    refuse_other_weights(path, states, {"name": "moved", "weights_sha256": "one"})
    refuse_other_weights(path, states, {"name": "elsewhere/tiny"})
    for other in ({"name": "folder/tiny", "weights_sha256": "two"}, {"name": "small"}):
        with pytest.raises(ConfigurationError, match="other weights of the model than states.pt was recorded with"):
            refuse_other_weights(path, states, other)


def test_knobs_that_differ_are_named() -> None:
    other = replace(FITTING, tiers=("low",), num_total_blocks=5)
    assert knob_differences(FITTING, FITTING) == ""
    assert knob_differences(FITTING, other) == (
        "tiers low, medium in place of low; blocks in the model 4 in place of 5"
    )
