"""Memory and utilisation of a setting, by hand."""

from dataclasses import replace

import pytest

from experiment_core_utils.finishing.setting_compute import (
    counted_memory,
    setting_compute,
    setting_memory,
    setting_utilisation,
)
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.meters.host_facts import Peaks
from experiment_core_utils.models.costs.decoder import BlockShape, MlpShape
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.records.requests import MemoryReading, StageFlops
from tests.hand_made_records import SETTING, answered_sample, measured_sample, part, staged_run
from tests.scripted.scripted_model import ScriptedModel

PEAKS = Peaks("a GPU", "bfloat16", 1000.0, 200.0, None)
NO_PEAKS = Peaks(None, "float32", None, None, "cpu is not a GPU: its peak speed is unknown")
# Keys and values of width 1 in one block.
BLOCK = BlockShape(query_width=1, kv_width=1, window=None, mlp=MlpShape(4))


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


# Keys and values of width 1 in one block.
BLOCK = BlockShape(query_width=1, kv_width=1, window=None, mlp=MlpShape(4))
MODEL = ModelBytes(weights_bytes=5000, step_weights_bytes=30.0, blocks=(BLOCK,), element_bytes=1)


def test_a_settings_memory_by_hand() -> None:
    reading = MemoryReading(10_000, 12_000, 777, None)
    # 422 prompt tokens and two of three, and of four, generated ones.
    samples = [measured_sample(1), measured_sample(2, staged_run(inter_token_s=(0.1, 0.1, 0.1)))]
    found = setting_memory(reading, samples, MODEL)
    assert found is not None
    assert (found["weights_bytes"], found["kv_cache_bytes"]) == (5000, (422 + 3) * 2)
    assert found["activation_bytes"] == 10_000 - 5000 - 850
    assert found["parts_reason"] is None


def test_the_cache_of_blocks_with_a_window_is_no_longer_than_it() -> None:
    reading = MemoryReading(10_000, 12_000, 777, None)
    # 422 prompt tokens and two generated ones; 2 bytes a position. A window of 50 keeps 49, one of 1000 all.
    for window, kept in ((None, 424), (1000, 424), (424, 423), (50, 49)):
        windowed = replace(MODEL, blocks=(BLOCK, replace(BLOCK, window=window)))
        found = setting_memory(reading, [measured_sample(1)], windowed)
        assert found is not None
        assert (found["kv_cache_bytes"], found["activation_bytes"]) == (2 * (424 + kept), 5000 - 2 * (424 + kept))


def test_counted_memory_follows_the_longest_prompt_and_the_longest_answer() -> None:
    """422 prompt tokens, and 3 of 4 generated ones; 2 bytes a position in the cache; 5 wide, 3 x 5 and gated 3 x 4."""
    samples = [measured_sample(1), measured_sample(2, staged_run(inter_token_s=(0.1, 0.1, 0.1))), answered_sample(3)]
    assert counted_memory(samples, replace(MODEL, hidden=5)) == {
        "counted_memory_bytes": 5000 + 2 * 425 + 422 * (15 + 12),
        "counted_weights_bytes": 5000,
        "counted_kv_cache_bytes": 2 * 425,
        "counted_activation_bytes": 422 * (15 + 12),
    }
    unknown = counted_memory(samples, MODEL)
    assert (unknown["counted_memory_bytes"], unknown["counted_kv_cache_bytes"]) == (None, 850)
    assert set(counted_memory(samples, None).values()) == set(counted_memory([], MODEL).values()) == {None}


def test_a_settings_memory_that_cannot_be_split_into_parts() -> None:
    reading = MemoryReading(10_000, 12_000, 777, None)
    batched = setting_memory(reading, [measured_sample(1), answered_sample(2)], MODEL)
    assert batched is not None
    assert (batched["weights_bytes"], batched["kv_cache_bytes"], batched["activation_bytes"]) == (5000, None, None)
    assert "answered in batches" in str(batched["parts_reason"])
    silent = setting_memory(reading, [measured_sample(1)], None)
    assert silent is not None and silent["parts_reason"] == "the model's number of bytes is unknown"
    on_cpu = setting_memory(MemoryReading(None, None, 777, "no CUDA device"), [measured_sample(1)], MODEL)
    assert on_cpu is not None
    assert (on_cpu["kv_cache_bytes"], on_cpu["activation_bytes"]) == (848, None)
    assert on_cpu["parts_reason"] == "no CUDA device"
    assert setting_memory(None, [], MODEL) is None


# Keys and values of width 1 in one block.
BLOCK = BlockShape(query_width=1, kv_width=1, window=None, mlp=MlpShape(4))


class Weighed(ScriptedModel):
    """A model with known bytes."""

    def count_bytes(self, setting: Setting) -> ModelBytes:
        return ModelBytes(weights_bytes=5000, step_weights_bytes=30.0, blocks=(BLOCK,), element_bytes=1)


def test_a_settings_memory_is_split_into_parts_beside_its_reading() -> None:
    sample = measured_sample(1, flops=StageFlops(200, 100, 20.0))
    merged = part(sample, memory=MemoryReading(10_000, 12_000, 777, None))
    found = setting_compute(SETTING, merged, Weighed(), "bfloat16")
    assert found.memory is not None and found.memory.content() == {
        "peak_memory_bytes": 10_000,
        "peak_reserved_bytes": 12_000,
        "process_rss_bytes": 777,
        "reason": None,
        "num_passes": None,
        "weights_bytes": 5000,
        "kv_cache_bytes": 2 * (422 + 2),
        "activation_bytes": 10_000 - 5000 - 848,
        "parts_reason": None,
        "counted_memory_bytes": None,
        "counted_weights_bytes": 5000,
        "counted_kv_cache_bytes": 2 * (422 + 2),
        "counted_activation_bytes": None,
    }
    shares = found.hardware_utilisation
    assert shares is not None
    assert shares.mfu_prefill is None and shares.peak_dtype == "bfloat16"
    assert shares.utilisation_reason == "cpu is not a GPU: its peak speed is unknown"
    assert setting_compute(SETTING, part(sample), Weighed(), None).memory is None
