"""Importance from made-up values of samples, with the arithmetic in view."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from experiment_core_utils.knobs.block_choice import read_block_sets, read_importance
from experiments.block_importance.importance import (
    Blocks,
    Estimate,
    Measured,
    TaskValues,
    against_baselines,
    chosen_by,
    difference,
    estimate,
    leave_one_out,
    passed_through,
    random_sets,
    save_scores,
    save_sets,
)


def measured(**tasks: tuple[Sequence[float], Sequence[str]]) -> Measured:
    return {name: TaskValues(tuple(values), tuple(images)) for name, (values, images) in tasks.items()}


def test_tasks_count_the_same_however_many_samples_they_have() -> None:
    found = estimate(measured(a=([1, 1, 0, 0], "pqrs"), b=([1], "t")))
    assert found.by_task == {"a": 0.5, "b": 1.0}
    assert found.value == 0.75


def test_the_error_of_one_task_of_single_questions_is_that_of_a_mean() -> None:
    # mean 2, sum of squares 1 + 0 + 1, s^2 = 2 / 2, s / sqrt(n) = 1 / sqrt(3)
    assert estimate(measured(a=([1, 2, 3], "pqr"))).standard_error == pytest.approx(1 / math.sqrt(3))


def test_the_error_knows_that_tasks_and_questions_share_pictures() -> None:
    # Weights 1/4 each. Residuals: a -> p: -1, q: +1; b -> p: -2, q: +2. By picture (-1 - 2) / 4 and (1 + 2) / 4.
    # Variance 2 / 1 * (0.75^2 + 0.75^2) = 2.25.
    assert estimate(measured(a=([0, 2], "pq"), b=([0, 4], "pq"))).standard_error == pytest.approx(1.5)
    # The same values on other pictures: residuals of 1/4 and 2/4, variance 4/3 * (2 / 16 + 2 / 4) = 5 / 6.
    apart = estimate(measured(a=([0, 2], "pq"), b=([0, 4], "rs"))).standard_error
    assert apart == pytest.approx(math.sqrt(5 / 6))


def test_one_picture_has_no_error() -> None:
    assert estimate(measured(a=([0, 2], "pp"))).standard_error is None


def test_only_the_same_samples_are_compared() -> None:
    with pytest.raises(ValueError, match="different samples"):
        difference(measured(a=([1], "p")), measured(a=([1], "q")))


class TableScorer:
    """Each of two samples loses a block's worth when it is not there."""

    measure = "made up"
    worth = ((0.5, 0.5), (0.1, 0.3), (0.0, 0.2))

    def __init__(self) -> None:
        self.scored: list[Blocks] = []

    def measured(self, sets: Sequence[Blocks]) -> list[Measured]:
        self.scored += sets
        values = [
            [1 - sum(worth[place] for block, worth in enumerate(self.worth) if block not in blocks) for place in (0, 1)]
            for blocks in sets
        ]
        return [measured(task=(each, "pq")) for each in values]


def test_leave_one_out_is_what_is_lost_without_a_block() -> None:
    scorer = TableScorer()
    scores, whole = leave_one_out(scorer, 3)
    assert scorer.scored == [(0, 1, 2), (1, 2), (0, 2), (0, 1)]
    assert whole.value == 1.0
    assert {block: round(each.value, 9) for block, each in scores.items()} == {0: 0.5, 1: 0.2, 2: 0.1}
    # Paired: block 0 costs both samples the same. Block 1: 0.1 and 0.3, s = 0.1 sqrt(2), / sqrt(2) = 0.1.
    assert scores[0].standard_error == pytest.approx(0.0)
    assert scores[1].standard_error == pytest.approx(0.1)


def test_the_choice_is_compared_with_as_many_blocks_of_each_baseline() -> None:
    scores = {0: Estimate(0.0, None, {}), 1: Estimate(0.1, None, {}), 2: Estimate(0.2, None, {})}
    chosen = chosen_by(scores, [2])
    assert chosen == {2: (0, 2)}
    sets = {"first": {2: [(0, 1)]}, "random": {2: [(0, 1), (0, 2)]}}
    found = against_baselines(TableScorer(), chosen, sets)[2]
    first, random = found.baselines["first"], found.baselines["random"]
    # Without block 1: 1 - 0.1 and 1 - 0.3; without block 2: 1 and 1 - 0.2.
    assert (found.chosen.value, first.score.value) == (pytest.approx(0.8), pytest.approx(0.9))
    assert first.gain.value == pytest.approx(-0.1)
    assert first.gain.standard_error == pytest.approx(0.0)
    # The mean of both sets.
    assert random.set_scores == (pytest.approx(0.9), pytest.approx(0.8))
    assert (random.score.value, random.gain.value) == (pytest.approx(0.85), pytest.approx(-0.05))


def test_random_sets_are_different_repeatable_and_all_there_are_of_few() -> None:
    sets = random_sets(12, 16, 42)
    assert len(set(sets)) == 5 and sets == random_sets(12, 16, 42) != random_sets(12, 16, 43)
    assert all(each[0] == 0 and list(each) == sorted(set(each)) and len(each) == 12 for each in sets)
    assert sorted(random_sets(2, 4, 0)) == [(0, 1), (0, 2), (0, 3)]
    assert random_sets(1, 4, 0) == ((0,),) and random_sets(4, 4, 0) == ((0, 1, 2, 3),)


def test_files_are_what_the_profiler_reads_and_provenance_lies_beside_them(tmp_path: Path) -> None:
    scores = {1: Estimate(0.25, 0.1, {"a": 0.25}), 0: Estimate(0.5, None, {"a": 0.5})}
    save_scores(tmp_path / "scores.json", scores, {"method": "leave_one_out"})
    assert json.loads((tmp_path / "scores.json").read_text()) == {"0": 0.5, "1": 0.25}
    assert read_importance(tmp_path / "scores.json") == {0: 0.5, 1: 0.25}
    provenance = json.loads((tmp_path / "scores.provenance.json").read_text())
    assert provenance["method"] == "leave_one_out"
    assert provenance["blocks"]["1"] == {"score": 0.25, "standard_error": 0.1, "by_task": {"a": 0.25}}
    save_sets(tmp_path / "sets.json", {3: (0, 1, 3), 2: (0, 3)}, {"method": "greedy"})
    assert read_block_sets(tmp_path / "sets.json") == {2: (0, 3), 3: (0, 1, 3)}
    assert (tmp_path / "sets.provenance.json").is_file()


class TupleBlock(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, str]:
        return hidden_states * 2, "cache"


def test_a_block_that_is_passed_through_changes_nothing_while_it_lasts() -> None:
    plain, with_more = nn.Linear(2, 2), TupleBlock()
    states = torch.ones(1, 1, 2)
    with passed_through(plain), passed_through(with_more):
        assert torch.equal(plain(states), states)
        assert torch.equal(with_more(states)[0], states)
        kept = with_more(hidden_states=states)
        assert torch.equal(kept[0], states) and kept[1] == "cache"
    assert not torch.equal(plain(states), states)
    assert torch.equal(with_more(states)[0], 2 * states)
