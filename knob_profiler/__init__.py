"""The profiler from Python: `profile` measures settings of the knobs, `load` reads a folder, `compare` compares two.

    import knob_profiler as kp

    results = kp.profile(task="reference_vqa", tiers=["low", "high"], top_k=[4, 8], samples=200)
    results.frame()

torch and transformers are imported when one of the names is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knob_profiler.api import Results, compare, load, profile
    from knob_profiler.comparing import ComparedResults

__all__ = ["ComparedResults", "Results", "compare", "load", "profile"]


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from knob_profiler import api

    return getattr(api, name)
