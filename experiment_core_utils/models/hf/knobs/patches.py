"""Changes of attributes of transformers' objects, made together and undone together.

A knob's changes are first listed completely and then made, so a list that cannot be made changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttributeChange:
    """One attribute of one object, and its new value."""

    owner: Any
    name: str
    value: Any


class AttributeChanges:
    """Changes that are in force together."""

    def __init__(self) -> None:
        self._before: list[AttributeChange] = []

    @property
    def in_force(self) -> list[AttributeChange]:
        """The attributes that were changed, each once, with the values that they have now."""
        places = {(id(change.owner), change.name): change for change in self._before}
        return [AttributeChange(each.owner, each.name, getattr(each.owner, each.name)) for each in places.values()]

    def put(self, changes: Sequence[AttributeChange]) -> None:
        """Make the changes on top of those in force; where one fails, all are undone and the error is raised again."""
        try:
            for change in changes:
                old = getattr(change.owner, change.name)
                setattr(change.owner, change.name, change.value)
                self._before.append(AttributeChange(change.owner, change.name, old))
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Restore every attribute to its value before the first change: the very same objects."""
        while self._before:
            change = self._before.pop()
            setattr(change.owner, change.name, change.value)
