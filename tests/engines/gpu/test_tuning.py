"""Tile sizes come from the row of the device; every width gets tiles that divide it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiment_core_utils.engines.gpu.triton import tuning
from experiment_core_utils.engines.gpu.triton.tuning import (
    TUNINGS,
    Card,
    ProductTile,
    ReadTile,
    Tile,
    batch_tiles_for,
    prefill_tiles_for,
    step_of_router,
    tiles_for,
    tuning_of,
    untuned_reason,
)
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights
from tests.conftest import tiny_config

H200 = Card("NVIDIA H200", 9, 227 * 1024)


@pytest.fixture(scope="module")
def decoder() -> DecoderWeights:
    return fuse_decoder_weights(MolmoeForConditionalGeneration(tiny_config()).eval())


def on(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Card, "of", classmethod(lambda cls, device: card))


def test_a_card_without_a_row_takes_the_default_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning_of("NVIDIA L40S") is tuning_of("NVIDIA H200") is TUNINGS["H200"]
    monkeypatch.setitem(TUNINGS, "L40S", TUNINGS["H200"])
    assert untuned_reason("NVIDIA L40S") is None


def test_the_cpu_can_nothing() -> None:
    assert Card.of(torch.device("cpu")) == Card()
    assert not Card().has_tf32 and not Card().is_hopper


def test_rows_fill_a_tile() -> None:
    """4 KiB rows: four fill 16 KiB; rows of 3 KiB take the room of 4; one row is taken however long it is, by more
    warps from 32 KiB on.
    """
    assert ReadTile(16, 4, 2).of_rows(4096) == ReadTile(16, 4, 2).of_rows(3072) == Tile(4, 4, 2)
    assert ReadTile(4, 2).of_rows(16 * 1024) == Tile(1, 2)
    assert ReadTile(4, 2, 3).of_rows(24 * 1024) == Tile(1, 4, 3) and ReadTile(4, 2).of_rows(1 << 20) == Tile(1, 16)


def test_a_router_of_many_experts_is_read_in_narrower_parts() -> None:
    assert [step_of_router(128, experts) for experts in (8, 128, 256, 512, 4096)] == [128, 128, 64, 32, 16]


def test_a_rows_own_sizes_are_taken(decoder: DecoderWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 32 in float32: rows of 128 bytes, so that 16 KiB are 128 rows."""
    assert tiles_for(decoder, 4, 64).qkv == Tile(128, 4, 2)
    monkeypatch.setitem(TUNINGS, "Other", tuning.Tuning(**{**vars(TUNINGS["H200"]), "qkv": ReadTile(4, 8)}))
    on(Card("Other", 8, 0), monkeypatch)
    assert tiles_for(decoder, 4, 64).qkv == Tile(32, 8)
    assert batch_tiles_for(decoder, 4, 64, 8).head.stages == 2


def test_many_heads_share_the_card_and_long_caches_are_cut(decoder: DecoderWeights) -> None:
    """One program less than five of each head are five of each; a part has one tile of positions, up to nine parts."""
    heads, rows = decoder.num_heads, tiles_for(decoder, 4, 64).attention.rows

    def splits(slots: int) -> int:
        return tiles_for(decoder, 4, slots, replace(TUNINGS["H200"], step_programs=5 * heads - 1, most_splits=9)).splits

    assert [splits(slots) for slots in (1, 5 * rows, 5 * rows + 1, 8 * rows, 100 * rows)] == [5, 5, 6, 8, 9]


def test_a_router_has_few_parts(decoder: DecoderWeights) -> None:
    """The output product's tile is at most doubled for it, and not for blocks without a router."""
    row = replace(TUNINGS["H200"], output=ReadTile(1, 4))
    rows = ReadTile(1, 4).of_rows(decoder.num_heads * decoder.head_width * 4).rows

    def output_rows(fewest: int, decoder: DecoderWeights = decoder) -> int:
        return tiles_for(decoder, 4, 64, replace(row, fewest_router_rows=fewest)).output.rows

    assert [output_rows(fewest) for fewest in (1, rows, 2 * rows, 100 * rows)] == [rows, rows, 2 * rows, 2 * rows]
    dense = replace(decoder, blocks=tuple(replace(block, router=None) for block in decoder.blocks))
    assert output_rows(100 * rows, dense) == rows


def test_molmoe_1b_on_an_h200_and_without_bulk_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.empty(0, dtype=torch.bfloat16)
    on(H200, monkeypatch)
    first, second = ProductTile(128, 64, 128, 32, 8, 3), ProductTile(256, 64, 128, 32, 8, 4, bulk=True)
    assert prefill_tiles_for(2048, 1024, weights) == (first, second)
    on(Card("NVIDIA A100-SXM4-80GB", 8, 163 * 1024), monkeypatch)
    assert prefill_tiles_for(2048, 1024, weights) == (first, first)
    on(Card("NVIDIA GeForce RTX 4090", 8, 99 * 1024), monkeypatch)
    assert prefill_tiles_for(2048, 1024, weights) == (ProductTile(64, 64, 64, 32, 4, 3),) * 2


def test_no_launch_parameter_stands_outside_the_table() -> None:
    """Warps, loads in flight and sizes of programs of the kernels are read from a row, never written at a launch."""
    sizes = re.compile(r"num_(warps|stages)=\d|^[A-Z_, ]+ = [\d, *]+$", re.MULTILINE)
    files = [path for path in Path(tuning.__file__).parent.glob("*.py") if path.name != "tuning.py"]
    assert {path.name: sizes.findall(path.read_text()) for path in files} == {path.name: [] for path in files}
