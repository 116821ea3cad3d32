"""What a CUDA graph does, on the CPU: operators are recorded once, and a replay runs them on the same memory."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.engines.pass_constants import PassConstants
from experiment_core_utils.primitives.errors import ConfigurationError

T = TypeVar("T")
# Operators whose result the host needs before it can go on, a number, or how many there are; the last makes a tensor of
# the host's values.
_WAITED_FOR = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "bincount", "lift_fresh",
}  # fmt: skip


class RecordedReplays(GraphCapturer):
    """Repeats the operators that ran when work was recorded; what the host computed then is as it was.

    Raises:
        ConfigurationError: the host would have to wait for the device, as a capture refuses.
    """

    def capture(self, work: Callable[[], T], constants: Sequence[torch.Tensor] = ()) -> Callable[[], T]:
        # Below such a mode some operators come in other pieces, so both passes are made below one.
        with _Recorder(refuses=False):
            work()
        try:
            return self._recorded(work)
        except ConfigurationError:
            return self._recorded(PassConstants(constants).without(work))

    def _recorded(self, work: Callable[[], T]) -> Callable[[], T]:
        recorder = _Recorder()
        with _ListsRefused(), recorder:
            output = work()

        def replay() -> T:
            for operator, args, kwargs, results in recorder.calls:
                _put(operator(*args, **kwargs), results)
            return output

        return replay


class _ListsRefused(TorchFunctionMode):
    """Lists of the device's values, which no operator makes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            raise ConfigurationError(f"it cannot be captured (the host would wait for {func.__name__})")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, refuses: bool = True) -> None:
        super().__init__()
        self._refuses = refuses
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._refuses and (name in _WAITED_FOR or _selects_by_mask(name, args)):
            raise ConfigurationError(f"it cannot be captured (the host would wait for {name})")
        result = func(*args, **kwargs)
        leaves = tree_flatten(result)[0]
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_flatten((args, kwargs))[0] if _has_values(leaf)}
        # A view shows what is written later by itself.
        views = all(_has_values(leaf) and leaf.untyped_storage().data_ptr() in given for leaf in leaves)
        if not views or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, leaves))
        return result


def _selects_by_mask(name: str, args: Any) -> bool:
    """Whether a mask decides how many values there are; one value for all of them is a fill."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    is_filling = name != "index" and args[2].numel() == 1
    return not is_filling and any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 0


def _put(found: Any, results: list[Any]) -> None:
    for new, old in zip(tree_flatten(found)[0], results, strict=True):
        if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)
