"""The bit-vector edit distance against hand-worked distances and the textbook table."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiment_core_utils.tasks.scoring.anls import levenshtein


def textbook(first: str, second: str) -> int:
    """The table of V. Levenshtein's distance, row by row."""
    above = list(range(len(second) + 1))
    for row, one in enumerate(first, start=1):
        current = [row]
        for column, other in enumerate(second, start=1):
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + (one != other)))
        above = current
    return above[-1]


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("kitten", "sitting", 3),  # k -> s, e -> i, + g
        ("flaw", "lawn", 2),  # - f, + n
        ("ab", "ba", 2),
        ("x" * 70, "x" * 69 + "y", 1),  # longer than a machine word
        ("ab" * 100, "ba" * 100, 2),  # - the first a, + a at the end
    ],
)
def test_by_hand(first: str, second: str, distance: int) -> None:
    assert levenshtein(first, second, limit=1000) == distance
    assert levenshtein(second, first, limit=1000) == distance
    assert levenshtein(first, second, limit=distance) == distance
    if distance:
        assert levenshtein(first, second, limit=distance - 1) is None


@settings(max_examples=300, deadline=None)
@given(st.text("abc ", max_size=90), st.text("abc ", max_size=90), st.integers(0, 90))
def test_equals_the_textbook_or_is_above_the_limit(first: str, second: str, limit: int) -> None:
    expected = textbook(first, second)
    assert levenshtein(first, second, limit) == (expected if expected <= limit else None)


def test_five_thousand_characters_cost_little() -> None:
    first, second = "abcde" * 1000, "abxde" * 1000
    started = time.process_time()
    assert levenshtein(first, second, limit=2500) == 1000
    assert time.process_time() - started < 1.0  # about 20 ms; the textbook's table takes several seconds
