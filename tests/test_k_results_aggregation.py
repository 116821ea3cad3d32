"""Parts of several processes become one whole, or an error says what does not fit."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.c_prompt_processing import share_of_process
from experiment_core_utils.k_results_aggregation import (
    collect_parts,
    merge_memory,
    merge_parts,
    part_path,
    read_part,
    remove_part,
    save_part,
)
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import ResultsError, WorkerLost
from experiment_core_utils.primitives.records import FailedSample, SettingFailure, StageFlops
from tests.hand_made_records import PROOF, SETTING, measured_sample, part, staged_run

KEY = SETTING.key


def two_parts() -> tuple:
    first = part(measured_sample(1), measured_sample(5), rank=0, num_processes=2)
    return first, part(measured_sample(3), rank=1, num_processes=2)


def test_a_part_comes_back_as_it_was(tmp_path: Path) -> None:
    text = measured_sample(
        2, staged_run(vision_s=None, inter_token_s=(), ended=False), has_picture=False, prediction="?"
    )
    whole = part(
        measured_sample(1, staged_run(), staged_run(prefill_s=0.1), flops=StageFlops(7, 3, 20.5)),
        text,
        failures=(FailedSample(4, "SampleError", "ä"),),
        memory=MemoryReading(5, 6, 7, None),
        failure=SettingFailure("OutOfMemory", "no room", 3),
    )
    save_part(whole, tmp_path)
    assert read_part(part_path(tmp_path, KEY, 0)) == whole
    assert part_path(tmp_path, KEY, 0).name == "tier-low_topk2_blocks3.rank0.json"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"key": "a", "fingerprint": 3}'])
def test_a_file_of_another_schema_is_an_error(tmp_path: Path, content: str) -> None:
    path = part_path(tmp_path, KEY, 0)
    path.write_text(content)
    with pytest.raises(ResultsError, match="is not a part of this version's schema"):
        read_part(path)


def test_parts_are_pooled_in_order_of_the_samples() -> None:
    first, second = two_parts()
    second = replace(
        second,
        failures=(FailedSample(4, "SampleError", "b"), FailedSample(0, "SampleError", "a")),
        memory=MemoryReading(None, None, 9, "cpu"),
        proof=None,
    )
    merged = merge_parts([second, first], (0, 1, 3, 4, 5))
    assert [sample.sample_id for sample in merged.samples] == [1, 3, 5]
    assert [failure.sample_id for failure in merged.failures] == [0, 4]
    assert (merged.rank, merged.num_processes, merged.failure) == (0, 2, None)
    assert merged.proof == PROOF
    assert merged.memory == MemoryReading(None, None, 9, "cpu")


@given(st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=20), st.integers(1, 5))
def test_any_split_comes_together(ids: list[int], processes: int) -> None:
    ids = sorted(ids)
    parts = [
        part(*map(measured_sample, share_of_process(ids, rank, processes)), rank=rank, num_processes=processes)
        for rank in range(processes)
    ]
    assert [sample.sample_id for sample in merge_parts(parts, ids).samples] == ids


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((1, 3, 5, 7), r"twice \[\], missing \[7\], not asked for \[\]"),
        ((1, 5), r"twice \[\], missing \[\], not asked for \[3\]"),
        ((1, 2, 5), r"twice \[\], missing \[2\], not asked for \[3\]"),
    ],
)
def test_missing_and_foreign_samples_are_named(wanted: tuple[int, ...], message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        merge_parts(two_parts(), wanted)


def test_doubled_samples_are_named() -> None:
    first, second = two_parts()
    doubled = replace(second, samples=(*second.samples, measured_sample(5)))
    with pytest.raises(ResultsError, match=r"twice \[5\], missing \[\]"):
        merge_parts([first, doubled], (1, 3, 5))
    both = replace(second, failures=(FailedSample(1, "SampleError", "failed elsewhere"),))
    with pytest.raises(ResultsError, match=r"twice \[1\]"):
        merge_parts([first, both], (1, 3, 5))


@pytest.mark.parametrize("change", [{"fingerprint": "beef"}, {"key": "tier-low_topk2_blocks4"}])
def test_parts_of_different_runs_do_not_mix(change: dict[str, str]) -> None:
    first, second = two_parts()
    with pytest.raises(ResultsError, match="belong to different runs"):
        merge_parts([first, replace(second, **change)], (1, 3, 5))


def test_one_process_that_failed_fails_the_setting() -> None:
    first, second = two_parts()
    failure = SettingFailure("OutOfMemory", "no room", 3)
    merged = merge_parts([first, replace(second, samples=(), failure=failure)], (1, 3, 5))
    assert merged.failure == failure


def test_memory_is_the_largest_of_each_figure() -> None:
    readings = [MemoryReading(10, 40, 3, None), MemoryReading(30, 20, 5, None)]
    assert merge_memory(readings) == MemoryReading(30, 40, 5, None)
    assert merge_memory([MemoryReading(None, None, 2, "cpu")]) == MemoryReading(None, None, 2, "cpu")
    assert merge_memory([]) is None


# --- waiting for parts --------------------------------------------------------------------------------------------


def test_parts_come_in_order_of_rank_once_all_are_there(tmp_path: Path) -> None:
    first, second = two_parts()
    save_part(first, tmp_path)
    late = threading.Timer(0.2, save_part, (second, tmp_path))
    late.start()
    assert collect_parts(tmp_path, KEY, "f00d", 2, timeout_s=10.0) == [first, second]
    late.join()


def test_a_part_that_does_not_come_is_named_after_the_time_out(tmp_path: Path) -> None:
    save_part(replace(two_parts()[0], num_processes=3), tmp_path)
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=rf"processes \[1, 2\] left no part of {KEY}"):
        collect_parts(tmp_path, KEY, "f00d", 3, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 5.0


@pytest.mark.parametrize("change", [{"fingerprint": "beef"}, {"num_processes": 3}])
def test_a_part_left_by_another_run_does_not_count(tmp_path: Path, change: dict) -> None:
    first, second = two_parts()
    save_part(first, tmp_path)
    save_part(replace(second, **change), tmp_path)
    with pytest.raises(WorkerLost, match=r"processes \[1\]"):
        collect_parts(tmp_path, KEY, "f00d", 2, timeout_s=0.1)
    threading.Timer(0.1, save_part, (second, tmp_path)).start()
    assert collect_parts(tmp_path, KEY, "f00d", 2, timeout_s=10.0) == [first, second]


def test_removing_takes_this_settings_parts_only(tmp_path: Path) -> None:
    first, second = two_parts()
    for each in (first, second, replace(first, key="other")):
        save_part(each, tmp_path)
    for rank in (0, 1, 1):
        remove_part(tmp_path, KEY, rank)
    assert [path.name for path in tmp_path.iterdir()] == ["other.rank0.json"]
