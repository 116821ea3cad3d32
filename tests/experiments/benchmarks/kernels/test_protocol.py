"""The protocol by hand: order of processes, divergences, ratios with their interval, the limit, and the gate."""

import math
from dataclasses import replace

import pytest
import torch

from experiments.benchmarks.kernels.protocol import Measured, bound_of, divergences, markdown, orders, ratio_of, rows

MEASURED = Measured("a", "modules", "card", 1e-4, 2e-4, 1e-3, 4e12, 6e12, bytes_s=2.0, products_s=1.0, seconds=3.0)


def test_the_order_of_processes_alternates() -> None:
    assert orders(["a", "b"], 3) == [("a", "b"), ("b", "a"), ("a", "b")]
    assert orders(["a", "b", "c"], 2) == [("a", "b", "c"), ("c", "b", "a")]
    assert orders(["a"], 2) == [("a",), ("a",)]


def test_divergences_of_two_and_three_tokens() -> None:
    """Of (1/2, 1/2) from (1/4, 3/4): ln 2 / 2 + ln (2/3) / 2 = ln (4/3) / 2; a shift of all logits changes nothing."""
    reference = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    found = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log() + torch.tensor([[7.0], [-3.0]])
    # Logits of size 7 in float32 are right to about 5e-7.
    assert divergences(reference, found) == pytest.approx([math.log(4 / 3) / 2, 0.0], abs=2e-6)
    one_of_three = torch.tensor([[1 / 2, 1 / 4, 1 / 4]]).log(), torch.tensor([[1 / 3, 1 / 3, 1 / 3]]).log()
    assert divergences(*one_of_three) == pytest.approx([math.log(3) - 1.5 * math.log(2)], abs=2e-6)


def test_the_bound_is_four_times_the_modules_own_divergence() -> None:
    assert bound_of([1e-3, 3e-3]) == pytest.approx(8e-3)
    assert bound_of([0.0, 1e-12]) == 1e-8


def test_three_pairs_have_an_interval_from_the_least_to_the_largest() -> None:
    """All of 27 draws are equally likely: 1/27 is above 2.5 %, so that the ends are the draws of one pair alone."""
    assert ratio_of([1.0, 3.0, 10.0], [2.0, 3.0, 5.0]) == pytest.approx((1.0, 0.5, 2.0))


def test_of_four_pairs_with_one_other_the_interval_is_binomial() -> None:
    """The other pair, of ratio 16, is drawn k of 4 times, a draw's mean is 2^k: k = 0 in 32 %, at least 3 in 5.1 %, and
    4 in 0.4 % of the draws.
    """
    assert ratio_of([1.0, 1.0, 16.0, 1.0], [1.0, 1.0, 1.0, 1.0]) == pytest.approx((2.0, 1.0, 8.0))


def test_two_pairs_have_no_interval() -> None:
    assert ratio_of([2.0, 8.0], [1.0, 1.0]) == (pytest.approx(4.0), None, None)


def test_a_time_is_a_multiple_of_the_slower_of_bytes_and_products() -> None:
    bound_by_products = replace(MEASURED, products_s=5.0)
    assert (MEASURED.times_limit, bound_by_products.times_limit) == (1.5, 0.6)
    assert rows([MEASURED], ["a"])[0]["limited_by"] == "bytes"
    assert rows([bound_by_products], ["a"])[0]["limited_by"] == "products"


def processes() -> list[Measured]:
    """Three pairs of a and b, as AB, BA, AB; b takes half of a's time."""
    b = replace(MEASURED, variant="b", way="cuda graph", seconds=1.5)
    return [MEASURED, b, replace(b, seconds=2.0), replace(MEASURED, seconds=4.0), MEASURED, replace(b, kl_mean=3e-4)]


def test_rows_pair_the_processes_and_take_medians() -> None:
    a, b = rows(processes(), ["a", "b"])
    assert (a["ms"], a["times_limit"], a["ratio"]) == (3000.0, 1.5, None)
    assert (b["ms"], b["times_limit"], b["kl_mean"]) == (1500.0, 0.75, 3e-4)
    assert [b[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([0.5, 0.5, 0.5])
    lines = markdown("decode", processes(), ["a", "b"]).splitlines()
    assert lines[0].startswith("decode; card; copy 4.000 TB/s, matrix product 6.000 TFLOP/s; 3 processes each; KL at ")
    assert lines[-1] == (
        "| b | cuda graph | 3.0e-04 (2.0e-04) | 1500.000 | 0.75 x the bytes' time | 0.500 [0.500, 0.500] |"
    )


def test_a_variant_that_the_gate_refused_once_has_no_time() -> None:
    refused = [replace(each, seconds=None) if each.kl_mean == 3e-4 else each for each in processes()]
    a, b = rows(refused, ["a", "b"])
    assert a["ms"] == 3000.0 and (b["ms"], b["times_limit"], b["ratio"]) == (None, None, None)
    assert "| refused |  |  |" in markdown("decode", refused, ["a", "b"])
    # Nor is anything compared with it.
    assert [row["ratio"] for row in rows(refused, ["b", "a"])] == [None, None]
