"""Which prompts run together, by hand and for any lengths; what counts of a generated row."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.config.text import Batching
from experiment_core_utils.measuring.text_shard import PlannedBatch, plan_batches


def adaptive(tokens: int, prompts: int = 32) -> Batching:
    return Batching(adaptive_batching=True, adaptive_max_tokens=tokens, max_batch_size___adaptive_batching=prompts)


def places(lengths: list[int], options: Batching) -> list[tuple[int, ...]]:
    return [batch.places for batch in plan_batches(lengths, options)]


def test_fixed_batches_by_hand() -> None:
    assert places([5] * 7, Batching(batch_size___fixed_batching=3)) == [(0, 1, 2), (3, 4, 5), (6,)]
    assert places([5] * 6, Batching(batch_size___fixed_batching=3)) == [(0, 1, 2), (3, 4, 5)]
    assert places([], Batching()) == places([], adaptive(8)) == []


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        # 2 x 4 = 8 fits, 3 x 4 = 12 does not.
        ([4, 4, 4, 4, 4], adaptive(8), [(0, 1), (2, 3), (4,)]),
        # The longest counts for all: 3 x 2 = 6 fits, with the 5 it would be 4 x 5 = 20; then 2 x 5 = 10.
        ([2, 2, 2, 5, 1], adaptive(10), [(0, 1, 2), (3, 4)]),
        # A short prompt after a long one is padded to it: 2 x 6 = 12.
        ([6, 1, 1], adaptive(11), [(0,), (1, 2)]),
        # At most two, whatever the tokens.
        ([1, 1, 1, 1, 1], adaptive(100, 2), [(0, 1), (2, 3), (4,)]),
    ],
)
def test_adaptive_batches_by_hand(lengths: list[int], options: Batching, expected: list[tuple[int, ...]]) -> None:
    assert places(lengths, options) == expected
    assert not any(batch.over_token_limit for batch in plan_batches(lengths, options))


def test_a_prompt_over_the_limit_runs_alone_and_says_so() -> None:
    batches = plan_batches([3, 9, 3, 3], adaptive(8))
    assert [(batch.places, batch.over_token_limit) for batch in batches] == [
        ((0,), False),
        ((1,), True),
        ((2, 3), False),
    ]


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.integers(1, 120),
    st.integers(1, 10),
)
def test_adaptive_batches_of_any_lengths(lengths: list[int], tokens: int, prompts: int) -> None:
    batches = plan_batches(lengths, adaptive(tokens, prompts))
    assert [place for batch in batches for place in batch.places] == list(range(len(lengths)))
    padded = [len(batch.places) * max(lengths[place] for place in batch.places) for batch in batches]
    for batch, size in zip(batches, padded, strict=True):
        assert len(batch.places) <= prompts
        assert size <= tokens or (len(batch.places) == 1 and batch.over_token_limit)
        assert batch.over_token_limit == (size > tokens)
    # No batch stops early: with the next prompt it would be too large.
    for batch, following in pairwise(batches):
        grown = [lengths[place] for place in (*batch.places, following.places[0])]
        assert len(grown) > prompts or len(grown) * max(grown) > tokens


def test_halves() -> None:
    first, second = PlannedBatch((3, 4, 5)).halves()
    assert (first, second) == (PlannedBatch((3,), halvings=1), PlannedBatch((4, 5), halvings=1))
    assert second.halves() == (PlannedBatch((4,), halvings=2), PlannedBatch((5,), halvings=2))
