"""Floors and ratios by hand, and the benchmark once over a tiny model with every way."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.execution import main
from experiments.benchmarks.execution_table import (
    Rates,
    Shape,
    Timed,
    Work,
    eager_of_generate,
    entries,
    markdown,
    stages_of_generate,
    totals_of_generate,
    work_of,
)
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


def rows() -> list[Timed]:
    def of(way: str, decode: list[float], totals: list[float]) -> Timed:
        return Timed("a", way, {"vision": [], "prefill": [0.5], "decode": decode}, totals, totals, (1,), True)

    return [of("generate", [0.2, 0.4, 0.3], [2.0, 4.0, 3.0]), of("graph", [0.03], [0.6])]


def test_ratios_are_of_medians() -> None:
    plain, graph = entries(rows(), {"a": {"decode": 0.01}})
    assert plain["decode_ms"] == pytest.approx(300.0) and plain["total_of_generate"] == 1.0
    assert graph["decode_of_generate"] == pytest.approx(0.1)
    assert graph["decode_over_floor"] == pytest.approx(3.0)
    assert graph["vision_ms"] is None and graph["prefill_over_floor"] is None
    assert totals_of_generate([plain, graph]) == {"generate": 1.0, "graph": pytest.approx(0.2)}
    assert "| a | graph |  | 500.00 | 30.00 (3.0 x) | 600.0 | 0.200 | yes |" in markdown([plain, graph])


def test_eager_steps_are_held_against_those_of_generate() -> None:
    other = {"case": "b", "way": "eager", "decode_of_generate": None}
    steps = [{"case": "a", "way": way, "decode_of_generate": 0.98} for way in ("generate", "eager", "graph")]
    assert eager_of_generate([*steps, other]) == {"a": 0.98}


def test_stages_are_summed_over_cases_and_steps_over_answers() -> None:
    """Two cases of 3 and 1 tokens: generate decodes 2 * 10 + 0 * 7, prefills 20 + 30, takes 50 + 30 in all; the floor
    decodes 2 * 1, prefills 5 + 10."""

    def row(way: str, tokens: int, prefill: float, decode: float, floor: float | None) -> dict[str, Any]:
        times = {"vision_ms": None, "prefill_ms": prefill, "decode_ms": decode, "total_ms": prefill + decode * 3}
        floors = {"vision_floor_ms": None, "prefill_floor_ms": floor, "decode_floor_ms": floor and 1.0}
        return {"way": way, "tokens": tokens, **times, **floors}

    found = stages_of_generate([row("generate", 3, 20.0, 10.0, 5.0), row("generate", 1, 30.0, 0.0, 10.0)])
    assert found["generate"] == {"prefill": 1.0, "decode": 1.0, "total": 1.0}
    assert found["floor"] == {
        "prefill": pytest.approx(15 / 50),
        "decode": pytest.approx(2 / 20),
        "total": pytest.approx(17 / 80),
    }
    assert list(stages_of_generate([row("generate", 3, 20.0, 10.0, None)])) == ["generate"]


def test_every_way_gives_the_same_tokens(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    size = "--prompt_tokens 12 --crops 1 --top_k_list 2 --new_tokens 4 --rounds 1 --batch_sizes 2 --num_threads 1"
    code = main(["--shape", str(tiny_checkpoint), "--device", "cpu", "--output", str(path), *size.split()])
    assert code == 0
    found = json.loads(path.read_text())
    assert [row["way"] for row in found["rows"]] == ["generate", "generate(static)", "eager", "graph"]
    assert all(row["same_tokens"] and row["decode_ms"] > 0 for row in found["rows"])
    assert [(each["batch"], each["way"]) for each in found["batches"]] == [(2, "eager"), (2, "graph")]
    assert found["execution"]["execution"] == "cpu"
    floor = found["stages_of_generate"]["floor"]
    assert found["flops_per_s"] > 0 and 0 < floor["prefill"] < 1
    assert found["rows"][0]["prefill_over_floor"] > 1
    assert "| top-k 2 | graph |" in capsys.readouterr().out


def test_the_decoder_alone_is_a_model_of_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    size = "--decoder_alone --prompt_tokens 12 --top_k_list 2 --new_tokens 4 --rounds 1 --num_threads 1"
    code = main(["--shape", str(tiny_checkpoint), "--device", "cpu", "--output", str(path), *size.split()])
    found = json.loads(path.read_text())
    assert code == 0
    assert found["execution"]["model_class"] == "OlmoeForCausalLM"
    assert all(row["same_tokens"] and row["tokens"] == 4 and row["vision_ms"] is None for row in found["rows"])
    assert found["eager_of_generate"] == {"top-k 2": found["rows"][2]["decode_of_generate"]}


def test_the_decoder_of_no_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--decoder_alone", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: --decoder_alone runs the decoder of a shape; give --shape too\n"
