"""The work of stages and its least time, by hand."""

import pytest

from experiments.benchmarks.kernels.work import Rates, Shape, Work, work_of
from tests.conftest import tiny_config


def test_a_decode_step_reads_the_chosen_experts_once() -> None:
    """Width 32, 2 heads, experts of 16, 8 of them; two blocks with 4 and 2 experts; a head of V rows; float32.

    A block: 4 * 32 * 32 of attention and 8 * 32 of the router; an expert: 3 * 32 * 16. The cache of 11 positions:
    2 * 32 values in each block.
    """
    config = tiny_config()
    work = work_of(config, Shape(0, 10, (4, 2)), 4)["decode"]
    weights = 2 * (4096 + 256) + 6 * 1536 + 32 * config.head_vocab_size
    assert work.bytes == 4 * (weights + 11 * 2 * 32 * 2)
    # 2 operations for each weight, and 4 * 11 * 32 for the attention of a block.
    assert work.flops == 2 * weights + 2 * 4 * 11 * 32


def test_a_prefill_reads_nearly_all_experts_and_half_the_rectangle() -> None:
    config = tiny_config()
    work = work_of(config, Shape(0, 1000, (4,)), 2)["prefill"]
    weights = 4096 + 256 + 8 * 1536 + 32 * config.head_vocab_size
    assert work.bytes == pytest.approx(2 * (weights + 1000 * 2 * 32))
    linear = 2 * 1000 * (4096 + 256 + 4 * 1536) + 2 * 32 * config.head_vocab_size
    assert work.flops == linear + 2 * 1000 * 1000 * 32


def test_a_floor_is_the_slower_of_products_and_bytes() -> None:
    rates = Rates(bytes_per_s=10.0, flops_per_s=100.0)
    assert Work(flops=200.0, bytes=10.0).floor_s(rates) == 2.0
    assert Work(flops=200.0, bytes=30.0).floor_s(rates) == 3.0
