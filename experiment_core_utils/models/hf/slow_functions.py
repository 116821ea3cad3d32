"""Functions of a model that transformers computes in plain torch where a package with their kernels is missing."""

import inspect
import sys
from collections.abc import Mapping

import torch
from torch import nn

from experiment_core_utils.records.caveats import Caveat, caveat

# Where the name that pip knows is not the one that is imported.
_DISTRIBUTIONS = {"fla": "flash-linear-attention"}


def slow_functions_of(model: nn.Module) -> dict[str, str]:
    """The package that each function lacks which the classes of a model's modules call; empty where none lacks one.

    Transformers wraps such a function and keeps there which package it looked for, and whether it found it.
    """
    found: dict[str, str] = {}
    for kind in {type(module) for module in model.modules()}:
        names = vars(sys.modules[kind.__module__])
        methods = [method for method in vars(kind).values() if inspect.isfunction(method)]
        for name in sorted({name for method in methods for name in inspect.unwrap(method).__code__.co_names}):
            package = _missing_package(names.get(name))
            if package is not None:
                found[name] = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
    return dict(sorted(found.items()))


def _missing_package(function: object) -> str | None:
    while inspect.isfunction(function):
        kept = inspect.getclosurevars(function).nonlocals
        if kept.get("is_new_implementation") is False and isinstance(kept.get("package"), str):
            return str(kept["package"])
        function = getattr(function, "__wrapped__", None)
    return None


def slow_functions_caveats(packages: Mapping[str, str] | None, device: torch.device) -> list[Caveat]:
    """The caveat of a model with such functions, none otherwise; on a CPU, for which no package has kernels, a note.

    Args:
        packages: as the model describes them.
    """
    if not packages:
        return []
    missing = sorted(set(packages.values()))
    kind = "no_kernels_on_cpu" if device.type == "cpu" else "kernels_missing"
    return [caveat(kind, functions=sorted(packages), packages=missing)]
