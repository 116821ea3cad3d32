"""Texts of others: what can be written as UTF-8, and what stands in a message of one line."""

import pytest

from experiment_core_utils.primitives.texts import is_text, shown


@pytest.mark.parametrize(
    ("value", "expected"), [("", True), ("naïve 中 \0", True), ("half \ud800", False), (b"x", False), (None, False)]
)
def test_what_is_a_text(value: object, expected: bool) -> None:
    assert is_text(value) is expected


def test_what_a_message_shows() -> None:
    assert shown("a\nb\0\ud800é") == "a\\nb\\x00\\ud800é"
    assert shown(["a"]) == "['a']"
    assert shown("x" * 5000) == f"{'x' * 100} ... {'x' * 100} (5000 characters)"
