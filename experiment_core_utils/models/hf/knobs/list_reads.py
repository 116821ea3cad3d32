"""Which lists of a config a decoder reads block by block while it runs, whatever their names.

A list with as many entries as there are blocks may be about the blocks or have this length by chance. While a prompt
runs, entry i of a list about blocks is read just before block i or inside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from experiment_core_utils.models.hf.knobs.patches import AttributeChange, AttributeChanges, hooks_removed, restored


@dataclass
class ListReads:
    """How one list was read; a read is (index or value asked for, last block that had started, -1 before the first)."""

    entries: list[tuple[int, int]] = field(default_factory=list)
    members: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def is_by_block(self) -> bool:
        """Whether every entry was read for the block of its number, of at least two blocks."""
        return _in_step(self.entries)

    @property
    def names_blocks(self) -> bool:
        """Whether blocks asked for their own number among the entries."""
        return _in_step([(value, started) for value, started in self.members if type(value) is int])


def _in_step(reads: Sequence[tuple[int, int]]) -> bool:
    return len({index for index, _ in reads}) > 1 and all(index - started in (0, 1) for index, started in reads)


class _Noting:
    """The methods of a sequence by which entries are read, each noting what it reads."""

    def note_in(self, reads: ListReads, started: Callable[[], int]) -> "_Noting":
        self._reads, self._started = reads, started
        return self

    def __getitem__(self, index: Any) -> Any:
        whole: Any = super()
        if isinstance(index, slice):
            places = range(*index.indices(whole.__len__()))
        else:
            places = range(int(index) % whole.__len__(), int(index) % whole.__len__() + 1)
        self._reads.entries += [(place, self._started()) for place in places]
        return whole.__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        whole: Any = super()
        for place, value in enumerate(whole.__iter__()):
            self._reads.entries.append((place, self._started()))
            yield value

    def __contains__(self, value: object) -> bool:
        self._reads.members.append((value, self._started()))
        whole: Any = super()
        return bool(whole.__contains__(value))


class _NotingList(_Noting, list[Any]):
    pass


class _NotingTuple(_Noting, tuple[Any, ...]):
    pass


@contextmanager
def reads_of(lists: Mapping[str, tuple[Any, str]], blocks: Sequence[nn.Module]) -> Iterator[Mapping[str, ListReads]]:
    """A context that notes the reads of lists while a decoder runs; never while timing.

    Args:
        lists: by a name of the caller's, the object with the list and the name of its attribute.
    """
    found = {name: ListReads() for name in lists}
    with _last_started(blocks) as started:
        noting = [
            AttributeChange(owner, attribute, _noting(getattr(owner, attribute), found[name], started))
            for name, (owner, attribute) in lists.items()
        ]
        with AttributeChanges().in_place(noting):
            # Some configs read a list when it is set, to check its entries.
            for reads in found.values():
                reads.entries.clear()
                reads.members.clear()
            yield found


@contextmanager
def entries_of(
    lists: Mapping[str, tuple[dict[Any, Any], Any]], blocks: Sequence[nn.Module]
) -> Iterator[Mapping[str, ListReads]]:
    """As `reads_of`, for lists in dictionaries: by a name of the caller's, the dictionary and the key of the list."""
    found = {name: ListReads() for name in lists}
    before = [(owner, key, owner[key]) for owner, key in lists.values()]

    def put_back() -> None:
        for owner, key, value in before:
            owner[key] = value

    with _last_started(blocks) as started, restored(put_back):
        for name, (owner, key) in lists.items():
            owner[key] = _noting(owner[key], found[name], started)
        yield found


@contextmanager
def _last_started(blocks: Sequence[nn.Module]) -> Iterator[Callable[[], int]]:
    """A context with the index of the block that started last, -1 before the first."""
    started = -1

    def starting(index: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal started
            started = index

        return hook

    handles = [block.register_forward_pre_hook(starting(index)) for index, block in enumerate(blocks)]
    with hooks_removed(handles):
        yield lambda: started


def _noting(value: Any, reads: ListReads, started: Callable[[], int]) -> Any:
    kind = _NotingTuple if isinstance(value, tuple) else _NotingList
    return kind(value).note_in(reads, started)
