"""Peaks in parts, by hand."""

from dataclasses import replace

from experiment_core_utils.h_metrics_compute import counted_memory, largest_batch_cache, memory_parts, setting_memory
from experiment_core_utils.models.costs.decoder import BlockShape, MlpShape
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.records.requests import MemoryReading
from tests.hand_made_records import answered_sample, measured_sample, staged_run
from tests.text_records import text_run

# Keys and values of width 1 in one block.
BLOCK = BlockShape(query_width=1, kv_width=1, window=None, mlp=MlpShape(4))
MODEL = ModelBytes(weights_bytes=5000, step_weights_bytes=30.0, blocks=(BLOCK,), element_bytes=1)


def test_activations_are_the_rest_of_the_peak() -> None:
    found = memory_parts(10_000, 5000, 848, 777)
    assert found == {
        "weights_bytes": 5000,
        "kv_cache_bytes": 848,
        "activation_bytes": 4152,
        "process_rss_bytes": 777,
        "parts_reason": None,
    }


def test_without_a_peak_there_are_no_activations() -> None:
    found = memory_parts(None, 5000, 848, 777, "no CUDA device")
    assert (found["activation_bytes"], found["kv_cache_bytes"], found["parts_reason"]) == (None, 848, "no CUDA device")


def test_parts_that_are_more_than_the_peak_leave_no_rest() -> None:
    found = memory_parts(5000, 5000, 1, 777)
    assert found["activation_bytes"] is None
    assert found["parts_reason"] == "weights and cache are more than the peak of 5000 bytes on this GPU"


def test_the_largest_batch_holds_padding_and_all_tokens_but_the_last() -> None:
    blocks = [BlockShape(query_width=8, kv_width=3, window=None, mlp=MlpShape(4))] * 2
    # Two rows of 5 + 3 - 1 positions; one row of 9 + 2 - 1. Two blocks, keys and values, 3 wide, 4 bytes.
    run = text_run([[(5, 3), (2, 1)], [(9, 2)]])
    assert largest_batch_cache(run["batches"], blocks, 4) == 2 * 7 * 2 * 2 * 3 * 4
    assert largest_batch_cache([], blocks, 4) == 0


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
