"""How far a process goes through its samples."""

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np

from experiment_core_utils.measuring.measurer import has_enough, num_requested
from experiment_core_utils.measuring.sample_runs import SettingAtWork, Shard
from experiment_core_utils.meters.stability import PrecisionGoal
from experiment_core_utils.primitives.contrasts import PairedContrasts
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import SettingError
from experiment_core_utils.records.settings import FinishedSample
from tests.hand_made_records import SETTING, failed_sample, measured_sample, staged_run

MEMORY = MemoryReading(None, None, 9, "cpu")
IDS = tuple(range(50, 0, -1))


def finished(sample_id: int, total_s: float = 1.0) -> FinishedSample:
    run = staged_run(vision_s=None, prefill_s=total_s, inter_token_s=())
    return FinishedSample(measured_sample(sample_id, run, has_picture=False), None, MEMORY)


def at_work(seconds: Mapping[int, float]) -> SettingAtWork:
    """A setting whose samples took so long."""
    shard = Shard(IDS, {each: finished(each, total_s) for each, total_s in seconds.items()})
    return SettingAtWork(SETTING, SimpleNamespace(), shard, SimpleNamespace())  # type: ignore[arg-type]


def test_without_a_goal_every_sample_is_requested() -> None:
    two = [at_work(dict.fromkeys(IDS, 1.0)) for _ in range(2)]
    assert num_requested(two, None) == 50 and not has_enough(two, 49, None)


def test_it_ends_where_the_ratio_of_two_settings_is_known() -> None:
    """Requests of 1 to 5 s; the second setting takes 1.2 times as long, the same at each."""
    lengths = {each: 1.0 + each % 5 for each in IDS}
    slower = {each: 1.2 * total_s for each, total_s in lengths.items()}
    assert num_requested([at_work(lengths), at_work(slower)], PrecisionGoal(0.02)) == 10
    # What was found before the end was reached is decided by the same samples.
    short = {each: slower[each] for each in IDS[:12]}
    assert num_requested([at_work(lengths), at_work(short)], PrecisionGoal(0.02)) == 10
    # A setting alone has no ratio, and one that is out none of interest.
    assert num_requested([at_work(lengths)], PrecisionGoal(0.02)) == 50
    other = at_work({each: total_s * 2 ** (each % 2) for each, total_s in slower.items()})
    assert num_requested([at_work(lengths), at_work(slower), other], PrecisionGoal(0.02)) == 50
    other.error = SettingError("out")
    assert num_requested([at_work(lengths), at_work(slower), other], PrecisionGoal(0.02)) == 10


def test_it_is_asked_at_a_tenth_more_samples_each_time() -> None:
    assert [PrecisionGoal.last_look(number) for number in (9, 10, 11, 12, 13, 14, 20, 100)] == [
        0, 10, 11, 11, 13, 13, 19, 94,
    ]  # fmt: skip


def test_samples_that_failed_or_are_missing_at_a_setting_have_no_ratio() -> None:
    one, other = at_work(dict.fromkeys(IDS, 1.0)), at_work(dict.fromkeys(IDS, 1.1))
    for each in IDS[:3]:
        one.shard.add(FinishedSample(None, failed_sample(each, "x"), MEMORY))
    # Ten of the first thirteen are left.
    assert num_requested([one, other], PrecisionGoal(0.02)) == 13


def test_the_ratio_covers_where_few_runs_are_very_slow() -> None:
    """1 % of runs ten times as long, 3 % three times: the mean of a run that ended when that looked precise covered
    27 and 60 %. Of 120 runs 95 % are right; 90 % are 2.5 standard deviations below.
    """
    generator = np.random.default_rng(5)
    for share, factor in ((0.01, 10.0), (0.03, 3.0)):
        covered = []
        for _ in range(120):
            own = generator.normal(0, 0.1, 200)
            runs = own + generator.normal(0, 0.04, (2, 200)) + np.log(factor) * (generator.random((2, 200)) < share)
            runs[1] += np.log(1.1)
            looks = sorted({PrecisionGoal.last_look(number) for number in range(10, 200)})
            number = next((n for n in looks if PrecisionGoal(0.05).is_reached(runs[:, :n], range(n))), 200)
            ends = PairedContrasts.of(runs[:, :number], range(number)).interval(1, 0)
            assert ends is not None
            covered.append(ends[0] <= 1.1 <= ends[1])
        assert np.mean(covered) >= 0.9


def test_a_beginning_can_be_extended_to_more() -> None:
    first = Shard(IDS[:5], {each: finished(each) for each in (*IDS[:5], 999)})
    assert first.num_finished == 5
    longer = Shard(IDS[:8], first.finished)
    assert longer.has_first(5) and not longer.has_first(8)
    assert [each for each in IDS if longer.lacks(each)] == list(IDS[5:8])
    assert list(longer.timed(3)) == list(IDS[:3])
