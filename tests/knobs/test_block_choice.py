"""Which blocks a file of scores or of sets lets run."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.knobs.block_choice import (
    BlockChoice,
    choice_by_scores,
    choice_by_sets,
    provenance_path,
    read_block_sets,
    read_importance,
    select_active_blocks,
)
from experiment_core_utils.primitives.errors import ConfigurationError


def test_without_a_file_the_first_blocks_run() -> None:
    assert BlockChoice().blocks(3, 5) == (0, 1, 2)


def test_scores_choose_by_rank() -> None:
    assert BlockChoice(scores={1: 0.1, 2: 0.9, 3: 0.3, 4: 0.5}).blocks(3, 5) == (0, 2, 4)


def test_sets_are_taken_as_they_are_and_all_blocks_need_none() -> None:
    choice = BlockChoice(sets={3: (0, 1, 4), 2: (0, 3)})
    assert choice.blocks(3, 5) == (0, 1, 4)
    assert choice.blocks(2, 5) == (0, 3)
    assert choice.blocks(5, 5) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("count", "total", "message"),
    [
        (4, 5, "has no set of 4 blocks; it has sets of 2, 3"),
        (3, 4, "names block 4, the model has blocks 0 to 3"),
        (6, 5, "6 active blocks are not possible; the model has 5"),
        (0, 5, "0 active blocks are not possible"),
    ],
)
def test_sets_that_do_not_fit_the_model_are_refused(count: int, total: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BlockChoice(sets={3: (0, 1, 4), 2: (0, 3)}).blocks(count, total)


def test_sets_are_read_by_number(tmp_path: Path) -> None:
    file = tmp_path / "sets.json"
    file.write_text('{"1": [0], "3": [0, 2, 3]}')
    assert read_block_sets(file) == {1: (0,), 3: (0, 2, 3)}


@pytest.mark.parametrize(
    "content",
    ["no json", "[]", "{}", '{"two": [0, 1]}', '{"2": [0]}', '{"2": [1, 2]}', '{"3": [0, 2, 1]}', '{"2": [0, 0]}',
     '{"2": [0, 1.0]}', '{"2": [false, true]}', '{"2": "01"}', '{"0": []}', '{"1": [0], "01": [0]}',
     f'{{"{"9" * 5000}": [0]}}', f'{{"1": [0, 1{"0" * 400}]}}'],
)  # fmt: skip
def test_a_file_without_sets_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "sets.json"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="--block_sets_file .*sets.json") as caught:
        read_block_sets(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gone.json: No such file"):
        read_importance(tmp_path / "gone.json")


@pytest.mark.parametrize("entry", [f'"1": 1{"0" * 400}', f'"1": -1{"0" * 400}', f'"{"9" * 5000}": 1.0', '"1": "x"'])
def test_a_score_that_no_float_holds_is_refused_in_one_short_line(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "scores.json"
    file.write_text(f"{{{entry}}}")
    with pytest.raises(ConfigurationError, match="--importance_scores_file .*scores.json: .* is not a score") as caught:
        read_importance(file)
    assert len(str(caught.value)) < 500


def test_a_models_own_scores_are_not_blamed_on_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "block_importance.json"
    for content in ('{"1": "x"}', '{"1": 1, "01": 1}', "[]", "no json"):
        file.write_text(content)
        with pytest.raises(ConfigurationError, match=f"^{file}"):
            read_importance(file, flag="")


def task_entry(**more: Any) -> dict[str, Any]:
    return {"split": "validation", "source": {"file": "a"}, "scored_ids": [7, 2], "scored_sha256": None, **more}


def test_the_questions_of_scores_and_sets_stand_in_the_provenance_beside_them(tmp_path: Path) -> None:
    scores, sets = tmp_path / "scores.json", tmp_path / "sets.json"
    scores.write_text('{"0": 1, "1": 0.25}')
    sets.write_text('{"2": [0, 3]}')
    tasks = {"one": task_entry(), "two": task_entry(scored_ids=[1], scored_sha256=["f00d"])}
    provenance_path(scores).write_text(
        json.dumps({"tasks": tasks, "blocks": {"0": {"score": 1.0}, "1": {"score": 0.25}}})
    )
    provenance_path(sets).write_text(json.dumps({"tasks": tasks, "sets": {"2": [0, 3]}}))
    for choice in (choice_by_scores(scores), choice_by_sets(sets)):
        assert choice.questions is not None and choice.is_made
        assert choice.questions["one"].scored_ids == (7, 2) and choice.questions["one"].scored_sha256 is None
        assert choice.questions["two"].scored_sha256 == ("f00d",)
    # Files that others wrote under the same name.
    scores.write_text('{"0": 1, "1": 0.5}')
    sets.write_text('{"2": [0, 2]}')
    assert choice_by_scores(scores).questions is None and choice_by_sets(sets).questions is None


@pytest.mark.parametrize(
    "content",
    [None, {}, [], {"tasks": {"one": {"split": "a", "source": {}}}, "blocks": {"1": {"score": 1.0}}},
     {"tasks": {"one": task_entry(scored_ids=["x"])}, "blocks": {"1": {"score": 1.0}}}],
)  # fmt: skip
def test_scores_without_their_questions_can_be_used(content: Any, tmp_path: Path) -> None:
    """None beside them, none in it, or those of an earlier version."""
    scores = tmp_path / "scores.json"
    scores.write_text('{"1": 1.0}')
    if content is not None:
        provenance_path(scores).write_text(json.dumps(content))
    assert choice_by_scores(scores) == BlockChoice(scores={1: 1.0}, file=scores)


def test_a_broken_provenance_is_named(tmp_path: Path) -> None:
    scores = tmp_path / "scores.json"
    scores.write_text('{"1": 1.0}')
    provenance_path(scores).write_text("{")
    with pytest.raises(ConfigurationError, match=r"scores.provenance.json.*move it away, or score the blocks again"):
        choice_by_scores(scores)


def test_without_scores_the_first_blocks_run() -> None:
    assert select_active_blocks(3, 5) == (0, 1, 2)


def test_with_scores_block_0_stays_and_the_best_others_join_in_order() -> None:
    scores = {0: 0.0, 1: 0.1, 2: 0.9, 3: 0.5, 4: 0.7}
    assert select_active_blocks(3, 5, scores) == (0, 2, 4)
    assert select_active_blocks(1, 5, scores) == (0,)
    assert select_active_blocks(5, 5, scores) == (0, 1, 2, 3, 4)


def test_equal_scores_favour_the_earlier_block() -> None:
    assert select_active_blocks(3, 4, {1: 0.5, 2: 0.5, 3: 0.5}) == (0, 1, 2)


def test_scores_that_leave_out_a_block_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"leave out blocks \[2, 4\]"):
        select_active_blocks(3, 5, {1: 0.1, 3: 0.4})


def test_scores_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"name blocks \[5\], the model has blocks 0 to 4"):
        select_active_blocks(3, 5, dict.fromkeys(range(6), 0.1))


@pytest.mark.parametrize("count", [0, 6, -1])
def test_block_counts_that_the_model_does_not_have_are_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="give 1 to 5"):
        select_active_blocks(count, 5)
