"""What a person sees of settings while they are measured."""

from types import SimpleNamespace

from experiment_core_utils.measuring.live_table import LiveTable
from experiment_core_utils.measuring.sample_runs import SettingAtWork, Shard
from experiment_core_utils.records.requests import MemoryReading
from experiment_core_utils.records.settings import FinishedSample
from experiment_core_utils.tasks.registry import get_metric
from tests.hand_made_records import SETTING, answered_sample, measured_sample, staged_run

NO_MEMORY = MemoryReading(None, None, 0, "not measured")


def at_work() -> SettingAtWork:
    return SettingAtWork(SETTING, SimpleNamespace(), Shard(range(4), {}), SimpleNamespace())  # type: ignore[arg-type]


def finish(each: SettingAtWork, sample: object) -> None:
    each.shard.add(FinishedSample(sample, None, NO_MEMORY))  # type: ignore[arg-type]


def test_a_line_has_what_the_samples_so_far_show() -> None:
    each = at_work()
    table = LiveTable([each], get_metric("em"))
    heading, line = table.lines()
    assert heading.split() == ["so", "far", "samples", "accuracy", "[95", "%]", "mean", "ms", "[95", "%]"]
    assert line.split() == ["tier-low_topk2_blocks3", "0/4", "–", "–"]
    # 1 s and 2 s in two runs of one sample; the other, right as well, was answered in a batch.
    finish(each, measured_sample(0, staged_run(), staged_run(vision_s=1.5), prediction="stop"))
    (_, line) = table.lines()
    assert line.split()[1:] == ["1/4", "1.000", "[0.03,", "1.00]", "1500.0"]
    finish(each, answered_sample(1, prediction="stop"))
    assert table.lines()[1].split()[1:3] == ["2/4", "1.000"]
    # 3.0 s beside 1.5 s: 2.25 s, and exp(12.7062 x 0.75 / 2.25) = 69.1 times as much or as little.
    finish(each, measured_sample(2, staged_run(vision_s=2.5), prediction="7"))
    assert table.lines()[1].split()[1:] == ["3/4", "0.667", "[0.09,", "0.99]", "2250.0", "[32.6,", "155451.2]"]


def test_a_metric_that_looks_at_all_answers_together_says_nothing_so_far() -> None:
    each = at_work()
    finish(each, measured_sample(0))
    assert LiveTable([each], get_metric("cider_score")).lines()[1].split()[1:3] == ["1/4", "–"]
