"""Utilisation in a text run, by hand."""

import pytest

from experiment_core_utils.models.costs.decoder import BlockShape, MlpShape
from experiment_core_utils.models.costs.memory import RoutedBytes, StepWeights
from experiment_core_utils.records.compute import GenerationFlops
from experiment_core_utils.text_run.generated_compute import decode_read_bytes, largest_batch_cache, text_utilisation
from tests.finishing.test_setting_compute import NO_PEAKS, PEAKS
from tests.text_records import text_run

FLOPS = GenerationFlops(
    prefill_flops=300,
    decode_flops=120,
    generation_flops=420,
    generation_flops_per_output_token=60.0,
    generation_flops_source="formula",
    generation_flops_reason=None,
)


def test_a_text_runs_fractions_by_hand() -> None:
    # Two batches: first tokens after 0.5 s each, 2 and 1 steps of 0.25 s.
    run = text_run([[(5, 3), (2, 1)], [(5, 2)]])
    found = text_utilisation(run, FLOPS, 60.0, PEAKS, num_gpus=1)
    assert found.content() == {
        "mfu_vision": None,
        "mfu_prefill": 300 / 1.0 / 1000,
        "mfu_decode": 120 / 0.75 / 1000,
        "mbu_decode": 60 / 0.75 / 200,
        "peak_flops_per_s": 1000.0,
        "peak_bytes_per_s": 200.0,
        "peak_dtype": "bfloat16",
        "utilisation_reason": None,
    }
    spread = text_utilisation(run, FLOPS, 60.0, PEAKS, num_gpus=2)
    assert spread.mfu_prefill == 0.15 and spread.mbu_decode == pytest.approx(60 / 1.5 / 200)


def test_what_is_not_known_has_no_fraction_and_a_reason() -> None:
    run = text_run([[(5, 3)]])
    on_cpu = text_utilisation(run, FLOPS, 60.0, NO_PEAKS, 1)
    shares = ("mfu_prefill", "mfu_decode", "mbu_decode")
    assert [getattr(on_cpu, name) for name in shares] == [None] * 3
    assert on_cpu.utilisation_reason == NO_PEAKS.reason
    unmarked = text_utilisation(text_run([[(5, 3)]], ttft_s=None), FLOPS, None, PEAKS, 1, ["unknown"])
    assert [getattr(unmarked, name) for name in shares] == [None] * 3
    assert unmarked.utilisation_reason == "the model's own generate() does not report single tokens; unknown"
    single = text_utilisation(text_run([[(5, 1)]]), {**FLOPS, "decode_flops": 0}, 0.0, PEAKS, 1)
    assert (single.mfu_prefill, single.mfu_decode, single.mbu_decode) == (0.6, None, None)


def test_bytes_that_decode_steps_must_read_by_hand() -> None:
    run = text_run([[(5, 3), (2, 1)], [(5, 2)]])
    weights = StepWeights(100, (RoutedBytes(stored=64, num_experts=4, top_k=1),))
    blocks = [BlockShape(query_width=8, kv_width=3, window=None, mlp=MlpShape(4))]
    # Two steps of two rows (1 - 9/16 of the experts), one of one row; keys of 6, 7 and 6 positions, twice 3 wide.
    expected = 2 * (100 + 64 * 7 / 16) + (100 + 16) + 2 * (6 + 7 + 6) * 2 * 3
    assert decode_read_bytes(run, weights, blocks, element_bytes=2) == expected


def test_the_largest_batch_holds_padding_and_all_tokens_but_the_last() -> None:
    blocks = [BlockShape(query_width=8, kv_width=3, window=None, mlp=MlpShape(4))] * 2
    # Two rows of 5 + 3 - 1 positions; one row of 9 + 2 - 1. Two blocks, keys and values, 3 wide, 4 bytes.
    run = text_run([[(5, 3), (2, 1)], [(9, 2)]])
    assert largest_batch_cache(run["batches"], blocks, 4) == 2 * 7 * 2 * 2 * 3 * 4
    assert largest_batch_cache([], blocks, 4) == 0
