"""Flags of a test over those that its fixtures give."""

from collections.abc import Sequence


def over(usual: Sequence[str], given: Sequence[str]) -> list[str]:
    """The usual flags without those that are given, with their values; then the given ones."""
    own = {word.partition("=")[0] for word in given if word.startswith("--")}
    kept, is_kept = [], True
    for word in usual:
        if word.startswith("--"):
            is_kept = word.partition("=")[0] not in own
        if is_kept:
            kept.append(word)
    return [*kept, *given]
