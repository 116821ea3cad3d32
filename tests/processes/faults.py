"""Failures of the calls by which a process opens and changes files: the n-th one fails or kills it."""

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

FAULTS = ("ENOSPC", "EIO", "kill")
# The kind of an open that changes nothing.
READ = "open to read"
# Calls of `os` whose first argument is a path, or a descriptor, and what they are called here.
_BY_PATH = {"replace": "rename", "rename": "rename", "unlink": "unlink", "remove": "unlink", "mkdir": "mkdir"}
_BY_DESCRIPTOR = {"write": "write", "pwrite": "write", "fsync": "fsync", "ftruncate": "truncate"}


class FaultyCalls:
    """The calls of this process for files in some folders, counted from 0; one of them fails.

    Counted are opening, writing, fsync, truncating, renaming, removing and making folders, through `os` and through
    `open`. Of a write that fails, half is done; what kills is done before that at every second place.
    A disk that is full stays so: after ENOSPC no write succeeds, while EIO comes once.

    Args:
        folders: the files in them count, at any depth.
        fail_at: the call that fails; None for none.
        fault: the error, or `kill` for SIGKILL.
    """

    def __init__(self, folders: Sequence[str], fail_at: int | None, fault: str) -> None:
        self._folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)
        self._fail_at = fail_at
        self._fault = fault
        #: kind and path of each call, in order
        self.places: list[tuple[str, str]] = []
        self._is_full = False

    def install(self) -> None:
        """From now on, and for the rest of this process."""
        for name, kind in (_BY_PATH | _BY_DESCRIPTOR).items():
            setattr(os, name, self._wrapped(kind, getattr(os, name)))
        os.open = self._opening_descriptor(os.open)
        io.open = builtins.open = self._opening(io.open)  # type: ignore[assignment]

    def at(self, kind: str, target: Any, call: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        """Make a call, or its failure where it is the one."""
        path = self._watched(target)
        if path is None:
            return call()
        self.places.append((kind, path))
        if self._is_full and kind == "write":
            self._fail(path)
        if len(self.places) - 1 != self._fail_at:
            return call()
        self._is_full = self._fault == "ENOSPC"
        if kind == "write":
            half()
        elif self._fault == "kill" and len(self.places) % 2:
            call()
        self._fail(path)

    def _fail(self, path: str) -> NoReturn:
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, self._fault)
        raise OSError(number, os.strerror(number), path)

    def _watched(self, target: Any) -> str | None:
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        except (OSError, TypeError):
            return None
        path = os.path.abspath(os.fsdecode(path))
        return path if os.path.join(path, "").startswith(self._folders) else None

    def _wrapped(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any, *arguments: Any, **keywords: Any) -> Any:
            def half() -> None:
                call(target, bytes(arguments[0])[: len(arguments[0]) // 2], *arguments[1:])

            return self.at(kind, target, lambda: call(target, *arguments, **keywords), half)

        return wrapped

    def _opening_descriptor(self, as_it_is: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            kind = "open" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else READ
            descriptor: int = self.at(kind, path, lambda: as_it_is(path, flags, mode, dir_fd=dir_fd))
            return descriptor

        return opened

    def _opening(self, as_it_is: Callable[..., Any]) -> Callable[..., Any]:
        faults = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                written: int = faults.at(
                    "write",
                    self.fileno(),
                    lambda: io.FileIO.write(self, data),
                    lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]),
                )
                return written

        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            def changed() -> Any:
                raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
                if buffering == 0:
                    return raw
                buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
                if "b" in mode:
                    return buffered
                return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

            def plain() -> Any:
                return as_it_is(file, mode, buffering, encoding, errors, newline, closefd, opener)

            writes = bool(set(mode) & set("wax+")) and faults._watched(file) is not None
            if isinstance(file, int):
                # It was opened, and counted, before.
                return changed() if writes else plain()
            return faults.at("open" if set(mode) & set("wax+") else READ, file, changed if writes else plain)

        return opened
