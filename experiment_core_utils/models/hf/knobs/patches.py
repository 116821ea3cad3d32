"""Changes of transformers' objects that are undone: attributes, methods and hooks.

A knob's changes are first listed completely and then made, so a list that cannot be made changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


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

    @contextmanager
    def in_place(self, changes: Sequence[AttributeChange]) -> Iterator[None]:
        """A context with the changes in force, all of which are undone afterwards."""
        self.put(changes)
        try:
            yield
        finally:
            self.put_back()


@contextmanager
def fields_in_force(owner: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `owner`, a config or an image processor, has these fields; restored afterwards."""
    with AttributeChanges().in_place([AttributeChange(owner, name, value) for name, value in fields.items()]):
        yield


@contextmanager
def replaced_method(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """A context with `function` in the place of a method of this one object."""
    before = vars(module).get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


@contextmanager
def hooks_removed(handles: Sequence[Any]) -> Iterator[None]:
    """A context at whose end these hooks are removed."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
