"""Pooling what the processes measured of a setting."""

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiment_core_utils.finishing.pooling import SharedSetting, collect_parts, merge_parts, with_pooled_energy
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import ResultsError, ResultsNotSaved, Stopped, WorkerLost
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.energy import AllocatedJoules, Basis, EnergyOrigin, EnergyPass
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, finished_samples
from experiment_core_utils.records.settings import (
    FinishedSample,
    JournalHeader,
    MeasuredSetting,
    SettingFailure,
    ShardDone,
)
from experiment_core_utils.tasks.sampling import shard_of_process
from tests.hand_made_records import PROOF, SETTING, failed_sample, measured_sample, part
from tests.processes.deadline import ends_within

KEY = SETTING.key


def two_parts() -> tuple:
    first = part(measured_sample(1), measured_sample(5), rank=0, num_processes=2)
    return first, part(measured_sample(3), rank=1, num_processes=2)


def test_parts_are_pooled_in_order_of_the_samples() -> None:
    first, second = two_parts()
    second = replace(
        second,
        failures=(failed_sample(4, "b"), failed_sample(0, "a")),
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
        part(*map(measured_sample, shard_of_process(ids, rank, processes)), rank=rank, num_processes=processes)
        for rank in range(processes)
    ]
    assert [sample.sample_id for sample in merge_parts(parts, ids).samples] == ids


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ((1, 3, 5, 7), r"twice \[\], missing \[7\], not requested \[\]"),
        ((1, 5), r"twice \[\], missing \[\], not requested \[3\]"),
        ((1, 2, 5), r"twice \[\], missing \[2\], not requested \[3\]"),
    ],
)
def test_missing_and_unknown_samples_are_named(wanted: tuple[int, ...], message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        merge_parts(two_parts(), wanted)


def test_requested_samples_must_be_there_and_other_drawn_ones_may() -> None:
    first, second = two_parts()
    first, second = replace(first, requested_ids=(5,), num_stopped_early=1), replace(second, requested_ids=(3,))
    merged = merge_parts([first, second], (1, 3, 5, 7, 9))
    # Sample 1 was finished beyond what is requested now, by an earlier run that was split otherwise.
    assert (merged.requested_ids, merged.num_stopped_early) == ((1, 3, 5), 1)
    with pytest.raises(ResultsError, match=r"missing \[7\]"):
        merge_parts([first, replace(second, requested_ids=(3, 7))], (1, 3, 5, 7, 9))
    with pytest.raises(ResultsError, match=r"not requested \[1\]"):
        merge_parts([first, second], (3, 5, 7, 9))


def test_doubled_samples_are_named() -> None:
    first, second = two_parts()
    doubled = replace(second, samples=(*second.samples, measured_sample(5)))
    with pytest.raises(ResultsError, match=r"twice \[5\], missing \[\]"):
        merge_parts([first, doubled], (1, 3, 5))
    both = replace(second, failures=(failed_sample(1, "failed elsewhere"),))
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


MEMORY = MemoryReading(None, None, 9, "cpu")
SHARDS = {0: (1, 5), 1: (3,)}


def header(rank: int = 0, experiment_id: str = "0007", fingerprint: str = "f00d", key: str = KEY) -> JournalHeader:
    return JournalHeader(JOURNAL_VERSION, key, fingerprint, rank, len(SHARDS), experiment_id, SHARDS[rank])


def keep(folder: Path, head: JournalHeader, *sample_ids: int, ends: bool = True, failure: bool = False) -> Path:
    """A journal of measured samples, with the end of the share behind them."""
    with Journal(folder, head) as journal:
        for sample_id in sample_ids:
            journal.append(FinishedSample(measured_sample(sample_id), None, MEMORY))
        if ends:
            reason = SettingFailure("OutOfMemory", "no room", 3) if failure else None
            journal.append(ShardDone(head.experiment_id, PROOF, MEMORY, reason))
    return journal.path


def collect(folder: Path, timeout_s: float = 10.0, stop: StopRequest | None = None) -> list[MeasuredSetting]:
    return collect_parts(SharedSetting(folder, KEY, "f00d", "0007", SHARDS), timeout_s, stop or StopRequest())


def ids_of(parts: Sequence[MeasuredSetting]) -> list[list[int]]:
    return [[sample.sample_id for sample in part.samples] for part in parts]


def test_parts_come_in_order_of_rank_once_all_are_at_their_end(tmp_path: Path) -> None:
    keep(tmp_path, header(0), 1, 5)
    keep(tmp_path, header(1), 3, ends=False)
    late = threading.Timer(0.2, keep, (tmp_path, header(1)))
    late.start()
    parts = collect(tmp_path)
    late.join()
    assert ids_of(parts) == [[1, 5], [3]]
    assert [(part.rank, part.num_processes, part.proof, part.failure) for part in parts] == [
        (0, 2, PROOF, None),
        (1, 2, PROOF, None),
    ]
    assert merge_parts(parts, (1, 3, 5)).experiment_ids == ("0007",)


def test_a_process_that_comes_to_no_end_is_named_with_what_it_owes_after_the_time_out(tmp_path: Path) -> None:
    keep(tmp_path, header(0), 1, ends=False)
    started = time.monotonic()
    with pytest.raises(
        WorkerLost, match=r"0.2 s by process 0 \(1 sample missing: 5\); process 1 \(1 sample missing: 3\);"
    ):
        collect(tmp_path, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 5.0


def test_no_process_waits_for_itself(tmp_path: Path) -> None:
    shared = SharedSetting(tmp_path, KEY, "f00d", "0007", SHARDS, own_rank=0)
    keep(tmp_path, header(1), 3)
    for make in (lambda: None, lambda: keep(tmp_path, header(0), 1, ends=False)):
        make()
        removed = pytest.raises(ResultsNotSaved, match=r"rank0\.jsonl was removed or cut while the run reads it; ")
        with ends_within(10.0), removed:
            collect_parts(shared, 3600.0, StopRequest())
    keep(tmp_path, header(0), 5)
    assert ids_of(collect_parts(shared, 3600.0, StopRequest())) == [[1, 5], [3]]


def test_another_process_whose_journal_is_removed_is_not_waited_for(tmp_path: Path) -> None:
    keep(tmp_path, header(0), 1, 5)
    path = keep(tmp_path, header(1), 3, ends=False)
    remover = threading.Timer(0.3, path.unlink)
    remover.start()
    with ends_within(20.0), pytest.raises(ResultsNotSaved, match=r"rank1\.jsonl was removed or cut"):
        collect(tmp_path, 3600.0)
    remover.join()


def test_a_process_that_still_finishes_samples_is_not_lost(tmp_path: Path) -> None:
    keep(tmp_path, header(1), 3)
    keep(tmp_path, header(0), ends=False)
    timers = [
        threading.Timer(1.0, keep, (tmp_path, header(0), 1), {"ends": False}),
        threading.Timer(2.0, keep, (tmp_path, header(0), 5)),
    ]
    for timer in timers:
        timer.start()
    assert ids_of(collect(tmp_path, timeout_s=1.8)) == [[1, 5], [3]]


def test_the_end_of_an_earlier_run_is_not_waited_past(tmp_path: Path) -> None:
    """Its samples count; that it failed, and that its share was done, say nothing about this run."""
    keep(tmp_path, header(0), 1, 5)
    keep(tmp_path, header(1, "0006"), 3, failure=True)
    with pytest.raises(WorkerLost, match=r"by process 1 \(no sample missing\)"):
        collect(tmp_path, timeout_s=0.1)
    keep(tmp_path, header(1))
    parts = collect(tmp_path)
    assert ids_of(parts) == [[1, 5], [3]]
    merged = merge_parts(parts, (1, 3, 5))
    assert merged.failure is None
    assert merged.experiment_ids == ("0006", "0007")


def test_samples_of_processes_that_this_run_has_no_more_count(tmp_path: Path) -> None:
    """An earlier run had a third process, which finished sample 5."""
    keep(tmp_path, replace(header(0, "0006"), rank=2, num_processes=3), 5, failure=True)
    keep(tmp_path, header(0), 1)
    keep(tmp_path, header(1), 3)
    assert set(finished_samples(tmp_path, KEY, "f00d")) == {1, 3, 5}
    assert finished_samples(tmp_path, KEY, "beef") == {}
    parts = collect(tmp_path)
    assert ids_of(parts) == [[1], [3], [5]]
    assert merge_parts(parts, (1, 3, 5)).failure is None


def test_a_shard_that_stopped_early_says_what_it_requested(tmp_path: Path) -> None:
    keep(tmp_path, header(1), 3)
    with Journal(tmp_path, header(0)) as journal:
        journal.append(FinishedSample(measured_sample(1), None, MEMORY))
        journal.append(ShardDone("0007", PROOF, MEMORY, None, num_given=2, num_asked=1))
    parts = collect(tmp_path)
    assert [(part.requested_ids, part.num_stopped_early) for part in parts] == [((1,), 1), ((3,), 0)]
    assert [sample.sample_id for sample in merge_parts(parts, (1, 3, 5)).samples] == [1, 3]


def test_the_end_of_a_shorter_shard_of_the_same_run_is_waited_past(tmp_path: Path) -> None:
    """A setting that is extended: the beginning of the share was measured before."""
    keep(tmp_path, header(1), 3)
    with Journal(tmp_path, replace(header(0), sample_ids=(1,))) as journal:
        journal.append(FinishedSample(measured_sample(1), None, MEMORY))
        journal.append(ShardDone("0007", PROOF, MEMORY, None, num_given=1, num_asked=1))
    with pytest.raises(WorkerLost, match=r"by process 0 \(1 sample missing: 5\)"):
        collect(tmp_path, timeout_s=0.1)
    with Journal(tmp_path, header(0)) as journal:
        journal.append(FinishedSample(measured_sample(5), None, MEMORY))
        journal.append(ShardDone("0007", PROOF, MEMORY, None, num_given=2, num_asked=2))
    assert ids_of(collect(tmp_path)) == [[1, 5], [3]]
    assert collect(tmp_path)[0].requested_ids == (1, 5)


def test_who_waits_can_be_stopped(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.note(signal.SIGTERM, None)
    with pytest.raises(Stopped, match="stopped by SIGTERM while waiting for process 0, 1;"):
        collect(tmp_path, stop=stop)


def allocated(joules: float | None, bound_j: float | None = None, basis: Basis = "counter") -> AllocatedJoules:
    origin = EnergyOrigin("GPU-1", "gpu", "nvml_counter", "measured", basis)
    if joules is None:
        return AllocatedJoules(None, None, None, None, "GPU is lost")
    return AllocatedJoules(joules, bound_j, "apportioned", origin, None)


def test_a_samples_energy_is_the_mean_over_passes_of_one_source() -> None:
    passes = [
        EnergyPass("0007", 0, index, 0, (1, 2, 3), 9, (), energies, ())
        for index, energies in enumerate(
            (
                (allocated(10.0, 1.0), allocated(5.0, 1.0), allocated(None)),
                (allocated(14.0, 2.0), allocated(7.0, None), allocated(None)),
                # By another source: it says nothing of the first two.
                (allocated(90.0, 9.0, "instant_power"), allocated(None), allocated(None)),
            )
        )
    ]
    samples = [measured_sample(each) for each in (1, 2, 3, 4)]
    one, two, three, four = (each.energy for each in with_pooled_energy(samples, passes, None))
    assert one is not None and (one.joules, one.bound_j, one.reason) == (12.0, 1.5, None)
    assert two is not None and (two.joules, two.bound_j) == (6.0, None)
    assert three is not None and (three.joules, three.reason) == (None, "GPU is lost")
    assert four is not None and four.reason == "it is not among the samples whose energy is measured"
    assert with_pooled_energy(samples, (), None) == tuple(samples)


def test_passes_of_the_process_that_measured_them_are_the_settings() -> None:
    first, second = two_parts()
    energy = EnergyPass("0007", 0, 0, 0, (first.samples[0].sample_id,), 3, (), (allocated(10.0, 1.0),), ())
    merged = merge_parts([replace(first, energy_passes=(energy,)), second], (1, 3, 5))
    assert merged.energy_passes == (energy,)
    assert [each.energy_j for each in merged.samples].count(10.0) == 1
