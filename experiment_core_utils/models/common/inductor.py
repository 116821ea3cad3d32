"""Functions that Inductor compiles, each for the modules as they are at its first call."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch

from experiment_core_utils.engines.cpu.build import private_folder
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, described
from experiment_core_utils.primitives.progress import announced

CACHE = "TORCHINDUCTOR_CACHE_DIR"
# On a GPU a product of one row becomes a Triton reduction, fused with its neighbours and with measured tile sizes, only
# with this flag (`mm` and `bmm` in torch/_inductor/decomposition.py). After that a decode step of one request has no
# product left that `max_autotune` would measure templates for, so the time that this takes is saved.
OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "fx_graph_cache": True}
T = TypeVar("T")


class InductorFunction(Generic[T]):
    """A function that Inductor compiles whole at its first call, for inputs of one shape.

    What is compiled is kept on disk, in `TORCHINDUCTOR_CACHE_DIR`, else beside the compiled kernels of the CPU. Two of
    these never share it in memory, since the guards of compiled code may not see all that knobs replace in modules.

    Args:
        function: takes and returns tensors; it may not need a decision of the host.
        name: of the function, for messages.

    Attributes:
        compile_s: seconds of the first call; None before it.
    """

    def __init__(self, function: Callable[..., T], name: str) -> None:
        _choose_folder()
        self._name = name
        self.compile_s: float | None = None

        def whole(*args: Any) -> T:
            if not torch.compiler.is_compiling():
                raise ConfigurationError(f"{name} is not compiled: torch.compile is switched off in the environment")
            return function(*args)

        # Compiled code belongs to a code object, which all closures of one definition have in common.
        alone = FunctionType(whole.__code__.replace(), whole.__globals__, name, None, whole.__closure__)
        self._compiled = torch.compile(alone, fullgraph=True, dynamic=False, options=OPTIONS)

    def __call__(self, *args: Any) -> T:
        """The function's result.

        Raises:
            ConfigurationError: it cannot be compiled; the message is the reason.
            OutOfMemory: there is no memory left to compile or to run it.
        """
        if self.compile_s is not None:
            return self._compiled(*args)
        started_s = HostClock().now_s()
        with announced(f"compiling {self._name} by Inductor"):
            try:
                with out_of_memory_named():
                    result = self._compiled(*args)
            except LIBRARY_ERRORS as error:
                raise ConfigurationError(f"Inductor cannot compile {self._name} ({_reason(error)})") from error
        self.compile_s = HostClock().now_s() - started_s
        return result


def _choose_folder() -> None:
    """Have Inductor keep what it compiles in a folder that lasts, unless the user has named one."""
    given = Path(os.environ.get(CACHE, ""))
    # torch puts its own choice, among temporary files, into the environment while it is imported.
    is_torchs = given.parent == Path(tempfile.gettempdir()) and given.name.startswith("torchinductor_")
    if CACHE not in os.environ or is_torchs:
        os.environ[CACHE] = str(private_folder("inductor"))


def _reason(error: BaseException) -> str:
    """The innermost error that Inductor wraps, in one line."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return described(error)
