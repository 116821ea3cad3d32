"""How far a process goes through its samples."""

from experiment_core_utils.meters.stability import PrecisionGoal
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.records.settings import FinishedSample
from experiment_core_utils.sweep.sample_runs import Shard
from tests.hand_made_records import failed_sample, measured_sample, staged_run

MEMORY = MemoryReading(None, None, 9, "cpu")
GOAL = PrecisionGoal(0.02)
IDS = tuple(range(50, 0, -1))


def finished(sample_id: int, total_s: float = 1.0) -> FinishedSample:
    run = staged_run(vision_s=None, prefill_s=total_s, inter_token_s=())
    return FinishedSample(measured_sample(sample_id, run, has_picture=False), None, MEMORY)


def is_done(shard: Shard) -> bool:
    return shard.has_first(shard.num_requested)


def measure(shard: Shard, seconds: dict[int, float], most: int = 1000) -> list[int]:
    """Ids in the order in which they are measured, at most so many before a kill."""
    done: list[int] = []
    for place, sample_id in enumerate(shard.sample_ids):
        if shard.is_enough(place) or len(done) == most:
            break
        if not shard.lacks(sample_id):
            continue
        done.append(sample_id)
        shard.add(finished(sample_id, seconds.get(sample_id, 1.0)))
    return done


def test_without_a_goal_every_sample_is_requested() -> None:
    shard = Shard(IDS, {50: finished(50), 999: finished(999)}, None)
    assert (shard.num_requested, shard.num_finished, is_done(shard)) == (50, 1, False)
    assert measure(shard, {}) == list(IDS[1:])
    assert is_done(shard)


def test_it_ends_as_soon_as_there_are_enough() -> None:
    shard = Shard(IDS, {}, GOAL)
    assert measure(shard, {}) == list(IDS[:10])
    assert (shard.num_requested, is_done(shard)) == (10, True)


def test_a_shard_that_never_gets_precise_is_measured_to_its_end() -> None:
    shard = Shard(IDS, {}, GOAL)
    assert measure(shard, {each: 1.0 + each % 2 for each in IDS}) == list(IDS)
    assert is_done(shard) and shard.num_requested == 50


def test_a_killed_shard_resumes_and_ends_at_the_same_place() -> None:
    # The first sample is far off, so that it takes more than ten.
    seconds = {50: 1.3}
    whole = Shard(IDS, {}, GOAL)
    at_once = measure(whole, seconds)
    assert 10 < len(at_once) < 50
    for kill_after in range(len(at_once) + 1):
        first = Shard(IDS, {}, GOAL)
        interrupted = measure(first, seconds, kill_after)
        second = Shard(IDS, first.finished, GOAL)
        assert interrupted + measure(second, seconds) == at_once
        assert is_done(second) and second.num_requested == len(at_once)


def test_a_beginning_can_be_extended_to_more() -> None:
    first = Shard(IDS[:5], {}, None)
    measure(first, {})
    longer = Shard(IDS[:8], first.finished, None)
    assert not is_done(longer)
    assert measure(longer, {}) == list(IDS[5:8])


def test_samples_that_failed_are_done_but_have_no_times() -> None:
    failed = {each: FinishedSample(None, failed_sample(each, "x"), MEMORY) for each in IDS[:3]}
    shard = Shard(IDS, failed, GOAL)
    assert measure(shard, {}) == list(IDS[3:13])
    assert is_done(shard)
    # One that failed for now is tried again before the share is done.
    hole = Shard(IDS, {each: finished(each) for each in IDS[1:12]}, GOAL)
    assert not is_done(hole)
