"""In: what a step returned (tensors, arrays, paths, tuples); out: the same in what JSON and CSV hold, or one error."""

import math
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError


def plain(value: Any, where: str) -> Any:
    """`value` in dicts, lists, text, numbers, booleans and None, nothing lost.

    Tensors and arrays become nested lists, their scalars numbers, tuples lists, paths text.

    Args:
        where: what the value is called, for the message.

    Raises:
        ResultsError: a value that has no such form (an object, a complex number, bytes), a number that is not finite,
            or a key that is no text; names the place.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value), where)
    if isinstance(value, Mapping):
        return {_text_key(key, where): plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, f"{where}.{index}") for index, each in enumerate(value)]
    if isinstance(value, np.ndarray | np.generic) or _is_tensor(value):
        return _from_array(value, where)
    raise ResultsError(f"{where} cannot be saved: a {type(value).__name__} has no form in JSON; convert it before")


def _from_array(value: Any, where: str) -> Any:
    content = value.tolist()
    if type(content) is type(value):  # some scalars (long double) have no Python form
        raise ResultsError(f"{where} cannot be saved: {value.dtype} has no exact form in JSON; convert it before")
    return plain(content, where)


def _is_tensor(value: Any) -> bool:
    """Stored results are read without torch; where it was never imported there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _finite(number: float, where: str) -> float:
    if not math.isfinite(number):
        raise ResultsError(f"{where} is {number}: results hold finite numbers, or None with a reason")
    return number


def _text_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ResultsError(f"{where} has the key {key!r}, a {type(key).__name__}: keys must be text")
    return str(key)
