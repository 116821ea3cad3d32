"""Changes of transformers' objects that are undone: attributes, methods and hooks.

A knob's changes are first listed completely and then made, so a list that cannot be made changes nothing. An old value
is noted before the new one is set, and forgotten after it was restored: an interrupt between any two lines loses none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


@contextmanager
def restored(put_back: Callable[[], None]) -> Iterator[None]:
    """A context at whose end `put_back` runs, and once more where an interrupt came while it ran."""
    try:
        try:
            yield
        finally:
            put_back()
    except BaseException:
        put_back()
        raise


class AttributeChanges:
    """Changes that are in force together."""

    def __init__(self) -> None:
        self._before: list[AttributeChange] = []

    def put(self, changes: Sequence[AttributeChange]) -> None:
        """Make the changes on top of those in force; where one fails, all are undone and the error is raised again."""
        try:
            for change in changes:
                old = getattr(change.owner, change.name)
                self._before.append(AttributeChange(change.owner, change.name, old))
                setattr(change.owner, change.name, change.value)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Restore every attribute to its value before the first change: the very same objects.

        After an interrupt it may be called again.
        """
        while self._before:
            change = self._before[-1]
            setattr(change.owner, change.name, change.value)
            self._before.pop()

    @contextmanager
    def in_place(self, changes: Sequence[AttributeChange]) -> Iterator[None]:
        """A context with the changes in force, all of which are undone afterwards."""
        with restored(self.put_back):
            self.put(changes)
            yield


@contextmanager
def fields_in_force(owner: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `owner`, a config or an image processor, has these fields; restored afterwards."""
    with AttributeChanges().in_place([AttributeChange(owner, name, value) for name, value in fields.items()]):
        yield


@contextmanager
def replaced_method(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """A context with `function` in the place of a method of this one object."""
    own = {name: vars(module)[name]} if name in vars(module) else {}

    def put_back() -> None:
        module.__dict__.pop(name, None)
        module.__dict__.update(own)

    with restored(put_back):
        module.__dict__[name] = function
        yield


@contextmanager
def hooks_removed(handles: Sequence[Any]) -> Iterator[None]:
    """A context at whose end these hooks are removed."""

    def remove() -> None:
        for handle in handles:
            handle.remove()

    with restored(remove):
        yield
