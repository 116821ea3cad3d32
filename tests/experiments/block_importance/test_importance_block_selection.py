"""Sets of blocks found by taking away, against made-up costs with interactions."""

from collections.abc import Callable, Sequence

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.block_importance.importance import Blocks, select_block_sets


def values(cost: dict[frozenset[int], float], total: int) -> Callable[[Sequence[Blocks]], list[float]]:
    def score(sets: Sequence[Blocks]) -> list[float]:
        return [-cost.get(frozenset(range(total)) - frozenset(blocks), 9.0) for blocks in sets]

    return score


# 1 is the cheapest block alone, but 2 and 3 are cheap together.
COST = {
    frozenset({1}): 0.1, frozenset({2}): 0.2, frozenset({3}): 0.3,
    frozenset({1, 2}): 0.9, frozenset({1, 3}): 0.8, frozenset({2, 3}): 0.5,
    frozenset({1, 2, 3}): 2.0,
}  # fmt: skip


def test_greedy_keeps_to_its_first_step_and_a_beam_does_not() -> None:
    score = values(COST, 4)
    assert select_block_sets(score, 4, [3, 2, 4]) == {3: (0, 2, 3), 2: (0, 2), 4: (0, 1, 2, 3)}
    assert select_block_sets(score, 4, [2], beam_width=2) == {2: (0, 1)}
    assert select_block_sets(score, 4, [1], beam_width=3) == {1: (0,)}


def test_at_equal_scores_the_earlier_blocks_stay() -> None:
    assert select_block_sets(lambda sets: [0.0] * len(sets), 5, [4, 3, 2]) == {
        4: (0, 1, 2, 3), 3: (0, 1, 2), 2: (0, 1)
    }  # fmt: skip


def test_each_step_scores_each_candidate_once() -> None:
    scored: list[list[Blocks]] = []

    def score(sets: Sequence[Blocks]) -> list[float]:
        scored.append(list(sets))
        return [0.0] * len(sets)

    select_block_sets(score, 4, [2], beam_width=3)
    assert scored == [[(0, 1, 2), (0, 1, 3), (0, 2, 3)], [(0, 1), (0, 2), (0, 3)]]


@pytest.mark.parametrize(("counts", "width"), [([], 1), ([0], 1), ([5], 1), ([3], 0)])
def test_what_cannot_be_selected_is_refused(counts: list[int], width: int) -> None:
    with pytest.raises(ConfigurationError):
        select_block_sets(lambda sets: [0.0] * len(sets), 4, counts, width)
