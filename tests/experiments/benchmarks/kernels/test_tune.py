"""The tuning command tries sensible candidates, takes the one with the least median, and prints a row to paste."""

import sys

import pytest
import torch

from experiment_core_utils.config.command import run_command
from experiment_core_utils.engines.gpu.triton import tuning
from experiment_core_utils.engines.gpu.triton.tuning import TUNINGS, Card, ReadTile
from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.benchmarks.kernels.tune import PARTS, fastest, main, product_tiles, read_tiles, row_text

HOPPER, AMPERE = Card("NVIDIA H200", 9, 227 * 1024), Card("NVIDIA A100-SXM4-80GB", 8, 163 * 1024)


def test_the_default_is_among_the_candidates() -> None:
    row = TUNINGS["H200"]
    assert all(getattr(row, part) in read_tiles(part) for part in PARTS)
    assert {row.prefill_gate_up, row.prefill_down} <= set(product_tiles(HOPPER))
    assert (len(read_tiles("qkv")), len(read_tiles("head"))) == (5 * 3 * 2, 5 * 3)


def test_bulk_copies_are_tried_from_hopper_on() -> None:
    assert len(product_tiles(HOPPER)) == 2 * len(product_tiles(AMPERE)) == 2 * 3 * 2 * 3
    assert not any(tile.bulk for tile in product_tiles(AMPERE))


def test_the_two_products_of_a_prompt_take_as_many_rows() -> None:
    assert {tile.row_block for tile in product_tiles(HOPPER)} == {160}


def test_the_least_median_wins() -> None:
    assert fastest({"one slow round": [1.0, 1.0, 9.0], "steady": [2.0, 2.0, 2.0], "same": [1.0, 1.0, 1.0]}) == (
        "one slow round"
    )
    with pytest.raises(ConfigurationError, match="no candidate of a kernel runs on this card"):
        fastest({})


def test_the_row_is_read_back_as_it_was() -> None:
    text = row_text(AMPERE, TUNINGS["H200"])
    assert eval("{" + text + "}", vars(tuning)) == {"A100-SXM4-80GB": TUNINGS["H200"]}
    assert ReadTile(16, 4, 2) == TUNINGS["H200"].qkv


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tune"])
    assert run_command(main) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "error: tile sizes are measured on a GPU, and this machine has none; run this where one is\n"
