"""What JSON can hold, and what is refused by name."""

import json
from collections import namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from experiment_core_utils.j_results_saving import plain
from experiment_core_utils.primitives.errors import ResultsError

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.1, 0.1),
        ("text", "text"),
        (Path("a/b"), "a/b"),
        ((1, "b"), [1, "b"]),
        (Pair(1, 2), [1, 2]),
        (MappingProxyType({"a": ()}), {"a": []}),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.array([[1, 2]]), [[1, 2]]),
        (torch.tensor([[5, 6]]), [[5, 6]]),
        (torch.tensor(2), 2),
        (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        (torch.tensor(True), True),
    ],
)
def test_values_by_hand(given: Any, expected: Any) -> None:
    found = plain({"x": given}, "results")["x"]
    assert found == expected and type(found) is type(expected)
    assert json.loads(json.dumps(found, allow_nan=False)) == expected


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"a": [1, {"b": object()}]}, r"results\.a\.1\.b cannot be saved: a object"),
        ({"a": float("nan")}, r"results\.a is nan"),
        ({"a": torch.tensor([1.0, float("inf")])}, r"results\.a\.1 is inf"),
        ({"a": np.float64("nan")}, r"results\.a is nan"),
        ({"a": {1: 2}}, r"results\.a has the key 1, a int"),
        ({"a": 1j}, r"results\.a cannot be saved: a complex"),
        ({"a": np.complex64(1j)}, r"results\.a cannot be saved: a complex"),
        ({"a": b"x"}, r"results\.a cannot be saved: a bytes"),
        ({"a": {1, 2}}, r"results\.a cannot be saved: a set"),
        ({"a": np.longdouble(1) / 3}, r"results\.a cannot be saved: float128"),
        ({"a": torch.dtype}, r"results\.a cannot be saved: a type"),
    ],
)
def test_what_would_lose_something_is_refused_by_its_place(given: Any, output: str) -> None:
    with pytest.raises(ResultsError, match=output) as caught:
        plain(given, "results")
    assert "\n" not in str(caught.value)
