"""Fields of a transformers config in the forms that the formulas know; other forms are refused by name."""

from collections.abc import Iterable
from typing import Any

from experiment_core_utils.primitives.errors import ProfilerError


class NotInTable(ProfilerError):
    """No formula is known for an architecture, or for a way in which it is configured; the message says which."""


def unknown(model_type: str, known: Iterable[str]) -> NotInTable:
    """The error for a `model_type` that is not among those known."""
    return NotInTable(f"no formula is known for {model_type!r}; there are formulas for {', '.join(sorted(known))}")


def one_number(config: Any, field: str) -> int:
    """A field's value as one number; some configs give a list with an entry for each side."""
    value = getattr(config, field)
    if not isinstance(value, int):
        raise NotInTable(f"no formula is known for {config.model_type} with {field} {value}; it must be one number")
    return value


def two_numbers(config: Any, field: str) -> tuple[int, int]:
    """(height, width) of a field that is one number or has an entry for each side."""
    value = getattr(config, field)
    height, width = (value, value) if isinstance(value, int) else value
    return height, width
