"""What passes of the same work compute from Python's values alone, remembered from the first one.

A GPU's graph cannot contain a copy from the host or a wait for it. Vendors' code makes both of sizes: masks, positions,
windows of pictures. Such values are the same in each pass, so the first pass computes them and later ones are given
them; what depends on weights, on inputs or on chance is computed in each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.private_apis import flattened

T = TypeVar("T")
_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)
_TO_HOST = (
    torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
)  # fmt: skip
_TAKE_INDICES = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
# Memory without values, which work that no operator shows may fill.
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
_OTHER_WORK = "its work on sizes is not the same in each pass"


@dataclass(eq=False)
class _Memory:
    """The memory of tensors that are views of each other."""

    varies: bool = False  #: whether what is ever written there depends on more than constants


@dataclass(eq=False)
class _Call:
    """An operator or function of the first pass."""

    function: Any
    read: list[_Memory]
    written: list[_Memory]
    varies: bool
    result: Any = field(repr=False)
    length: int | None = None  #: of a range that begins at a number on the device

    @property
    def is_constant(self) -> bool:
        return not self.varies and not any(memory.varies for memory in (*self.read, *self.written))


class PassConstants:
    """The constants of one work.

    Args:
        inputs: tensors from before the passes whose values are the same in each.
    """

    def __init__(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        self._inputs = tuple(inputs)
        self._calls: list[_Call] | None = None

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """A context for one pass; the first one notes the constants.

        Raises:
            ConfigurationError: a later pass does other work than the first one, or a constant is changed after it was
                used.
        """
        passing = _FirstPass(self._inputs) if self._calls is None else _LaterPass(self._calls)
        with _like_a_capture(), _AcrossHost(passing), passing:
            yield
        self._calls = passing.finished()

    def without(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work in passes that no longer compute its constants, after a first one, which has run.

        What records such a pass must keep this object: the constants' memory belongs to it.
        """

        def passed() -> T:
            with self.of_pass():
                return work()

        passed()
        return passed


@contextmanager
def _like_a_capture() -> Iterator[None]:
    """A context in which code that asks is told that a graph is being captured: it then computes other masks."""
    plain = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = plain


class _Pass(TorchDispatchMode):
    """What is told of each operator, and of each function that exchanges values with the host."""

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def finished(self) -> list[_Call]:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_inside or func is torch.ops.aten.detach.default:
            # The same memory again, and not as often in each pass.
            return func(*args, **kwargs)
        if func in _TAKE_INDICES:
            # Where a mask selects what is filled with one value, nothing is counted.
            is_filling = func is not torch.ops.aten.index.Tensor and args[2].numel() == 1
            indices = args[1] if is_filling else [index for mask in args[1] for index in self._without_masks(mask)]
            if args[0].device.type != "cpu":
                indices = [self._on_device(index, args[0].device) for index in indices]
            args = (args[0], indices, *args[2:])
        return self.called(func, args, kwargs)

    def _without_masks(self, index: Any) -> Sequence[Any]:
        """A mask among indices as the places that it selects, which the operator would count by itself."""
        if not isinstance(index, torch.Tensor) or index.dtype is not torch.bool:
            return [index]
        rows = self.called(torch.ops.aten.nonzero.default, (index,), {})
        columns: Sequence[Any] = self.called(torch.ops.aten.unbind.int, (rows, 1), {})
        return columns

    def _on_device(self, index: Any, device: torch.device) -> Any:
        """A list of the host's indices, which the operator would copy by itself."""
        is_on_host = isinstance(index, torch.Tensor) and index.device.type == "cpu"
        return self.called(torch.ops.aten._to_copy.default, (index,), {"device": device}) if is_on_host else index

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_inside = False


class _AcrossHost(TorchFunctionMode):
    def __init__(self, passing: _Pass) -> None:
        super().__init__()
        self._passing = passing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_HOST or func in _FROM_HOST or _counts_from_tensor(func, args, kwargs or {}):
            return self._passing.called(func, args, kwargs or {})
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], self._without_lists(args[1], args[0].device), *args[2:])
        return func(*args, **(kwargs or {}))

    def _without_lists(self, key: Any, device: torch.device) -> Any:
        """The key of an indexing with tensors in place of lists, each of which would be copied from the host."""
        if isinstance(key, tuple):
            return tuple(self._without_lists(each, device) for each in key)
        if not isinstance(key, list) or any(isinstance(each, torch.Tensor) for each in key):
            return key
        return self._passing.called(torch.tensor, (key,), {"device": device})


class _FirstPass(_Pass):
    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        #: by address; memory that is not here is from before the pass
        self._memories = {_address(each): _Memory() for each in inputs}
        self._calls: list[_Call] = []

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        # What is lifted is a tensor that was just made of the host's values.
        given = [] if function is torch.ops.aten.lift_fresh.default else _tensors((args, kwargs))
        read = [self._memory(each) for each in given]
        result = self._run(function, args, kwargs)
        addresses = {_address(each) for each in given}
        # An address may be that of memory that was given back.
        fresh = {_address(each): _Memory() for each in _tensors(result) if _address(each) not in addresses}
        self._memories.update(fresh)
        written = list(fresh.values())
        written += [self._memory(each) for each in _changed(function, args, kwargs)]
        varies = _is_by_chance(function)
        if varies or any(memory.varies for memory in read):
            for memory in written:
                memory.varies = True
        kept = None if varies or any(memory.varies for memory in (*read, *written)) else result
        length = len(result) if function is torch.arange else None
        self._calls.append(_Call(function, read, written, varies, kept, length))
        return _handed_out(function, result)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        return self._memories.get(_address(tensor)) or _Memory(varies=True)

    def finished(self) -> list[_Call]:
        is_settled = False
        while not is_settled:
            is_settled = True
            for call in self._calls:
                late = [memory for memory in call.written if not memory.varies]
                if late and (call.varies or any(memory.varies for memory in call.read)):
                    is_settled = False
                    for memory in late:
                        memory.varies = True
        last_written: dict[_Memory, int] = {}
        for place, call in enumerate(self._calls):
            if call.is_constant:
                last_written.update(dict.fromkeys(call.written, place))
            else:
                call.result = None
        for place, call in enumerate(self._calls):
            if not call.is_constant and any(last_written.get(memory, -1) > place for memory in call.read):
                raise ConfigurationError("what depends on sizes alone is changed after it was used")
        return self._calls


class _LaterPass(_Pass):
    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls, self._place = calls, 0

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self._place == len(self._calls) or self._calls[self._place].function != function:
            raise ConfigurationError(_OTHER_WORK)
        call = self._calls[self._place]
        self._place += 1
        if call.is_constant:
            return _handed_out(function, call.result)
        if call.length is not None:
            return self._run(_counted, (*args[:1], call.length), kwargs)
        return self._run(function, args, kwargs)

    def finished(self) -> list[_Call]:
        if self._place != len(self._calls):
            raise ConfigurationError(_OTHER_WORK)
        return self._calls


def _counts_from_tensor(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a range from a number on the device to another one, of which the host would ask how long it is."""
    return function is torch.arange and len(args) == 2 and isinstance(args[0], torch.Tensor) and "out" not in kwargs


def _counted(start: torch.Tensor, length: int, **kwargs: Any) -> torch.Tensor:
    """`torch.arange(start, start + length, **kwargs)`"""
    device = kwargs.pop("device", None)
    kwargs.setdefault("dtype", start.dtype)
    return start.to(device) + torch.arange(length, device=device or start.device, **kwargs)


def _handed_out(function: Any, result: Any) -> Any:
    """A result that may be remembered; who asked for a list may change it."""
    return deepcopy(result) if function is torch.Tensor.tolist else result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flattened(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _changed(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator changes in place."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        kwargs.get(each.name, args[place] if place < len(args) else None) for place, each in enumerate(schema.arguments)
    ]
    writes = [each.alias_info is not None and each.alias_info.is_write for each in schema.arguments]
    return _tensors([value for value, is_written in zip(given, writes, strict=True) if is_written])


def _is_by_chance(function: Any) -> bool:
    return (
        torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        or getattr(getattr(function, "overloadpacket", None), "__name__", "") in _EMPTY
    )


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
