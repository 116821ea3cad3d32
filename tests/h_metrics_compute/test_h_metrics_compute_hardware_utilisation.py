"""MFU and MBU of runs with round numbers, on a GPU whose peaks are round numbers."""

from dataclasses import replace

import pytest

from experiment_core_utils.h_metrics_compute import (
    decode_read_bytes,
    fraction_of_peak,
    setting_utilisation,
    text_utilisation,
)
from experiment_core_utils.meters.host_facts import Peaks
from experiment_core_utils.models.costs.decoder import BlockShape, MlpShape
from experiment_core_utils.models.costs.memory import ModelBytes, RoutedBytes, StepWeights
from experiment_core_utils.records.compute import GenerationFlops
from experiment_core_utils.records.requests import StageFlops
from tests.hand_made_records import answered_sample, measured_sample, staged_run
from tests.text_records import text_run

PEAKS = Peaks("a GPU", "bfloat16", 1000.0, 200.0, None)
NO_PEAKS = Peaks(None, "float32", None, None, "cpu is not a GPU: its peak speed is unknown")
# Keys and values of width 1 in one block.
BLOCK = BlockShape(query_width=1, kv_width=1, window=None, mlp=MlpShape(4))
FLOPS = GenerationFlops(
    prefill_flops=300,
    decode_flops=120,
    generation_flops=420,
    generation_flops_per_output_token=60.0,
    generation_flops_source="formula",
    generation_flops_reason=None,
)


def test_a_fraction_of_a_peak() -> None:
    assert fraction_of_peak(300.0, 2.0, 1000.0) == 0.15
    assert fraction_of_peak(None, 2.0, 1000.0) is None
    assert fraction_of_peak(300.0, None, 1000.0) is None
    assert fraction_of_peak(300.0, 0.0, 1000.0) is None
    assert fraction_of_peak(300.0, 2.0, None) is None


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


def test_a_settings_fractions_are_means_over_samples() -> None:
    flops = StageFlops(vision_flops=200, prefill_flops=100, decode_flops_per_token=20.0)
    # vision 0.5 s, prefill 0.25 s, two steps in 0.25 s; prompts of 422 tokens.
    usual = measured_sample(1, flops=flops)
    slow = measured_sample(2, staged_run(vision_s=1.0, prefill_s=0.5, inter_token_s=(0.25, 0.25)), flops=flops)
    text = measured_sample(
        3, staged_run(vision_s=None, inter_token_s=()), has_picture=False, flops=StageFlops(None, 50, None)
    )
    bytes_of_model = ModelBytes(weights_bytes=5000, step_weights_bytes=30.0, blocks=(BLOCK,), element_bytes=1)
    found = setting_utilisation([usual, slow, text, answered_sample(4)], bytes_of_model, PEAKS)
    assert found.mfu_vision == pytest.approx((0.4 + 0.2) / 2)
    assert found.mfu_prefill == pytest.approx((0.4 + 0.2 + 0.2) / 3)
    # 40 operations in 0.25 s and in 0.5 s.
    assert found.mfu_decode == pytest.approx((0.16 + 0.08) / 2)
    # Two steps of 30 bytes, 423 + 424 keys of 2 bytes.
    read = 2 * 30 + (423 + 424) * 2
    assert found.mbu_decode == pytest.approx((read / 0.25 / 200 + read / 0.5 / 200) / 2)
    assert found.utilisation_reason is None


def test_blocks_with_a_window_read_no_more_than_it() -> None:
    flops = StageFlops(vision_flops=200, prefill_flops=100, decode_flops_per_token=20.0)
    # Of 422 prompt tokens and two steps: 423 + 424 keys without a window, and with one of 1000 or of 424; 423 twice
    # with one of 423; 50 twice with one of 50. Each is 2 bytes.
    for window, keys in ((None, 847), (1000, 847), (424, 847), (423, 846), (50, 100)):
        windowed = ModelBytes(5000, 30.0, (BLOCK, replace(BLOCK, window=window)), element_bytes=1)
        found = setting_utilisation([measured_sample(1, flops=flops)], windowed, PEAKS)
        assert found.mbu_decode == pytest.approx((2 * 30 + 2 * (847 + keys)) / 0.25 / 200)


def test_a_setting_without_measured_samples_or_known_bytes() -> None:
    found = setting_utilisation([answered_sample(1)], None, PEAKS)
    assert (found.mfu_prefill, found.mbu_decode) == (None, None)
    assert found.utilisation_reason == "no sample with known operations was measured"
    on_cpu = setting_utilisation([measured_sample(1)], None, replace(NO_PEAKS))
    assert on_cpu.utilisation_reason == NO_PEAKS.reason
    sample = measured_sample(1, flops=StageFlops(200, 100, 20.0))
    silent = setting_utilisation([sample], None, PEAKS)
    assert silent.mfu_prefill == 0.4 and silent.mbu_decode is None
    assert silent.utilisation_reason == "the model's number of bytes is unknown"
