"""The load of a setting's window: a line of the journal whatever came of it, and its entries by hand."""

from functools import partial
from pathlib import Path

import pytest

from experiment_core_utils.finishing.setting_compute import loads_of, timelines_of
from experiment_core_utils.measuring.sample_runs import load_noted
from experiment_core_utils.meters.load import LoadSampler, unavailable
from experiment_core_utils.primitives.errors import OutOfMemory, Stopped
from experiment_core_utils.records.compute import LoadSample, LoadTrace
from experiment_core_utils.records.journal import JOURNAL_VERSION, Journal, read_journal
from experiment_core_utils.records.settings import JournalHeader, SettingLoad
from tests.scripted.simulated_meters import ScriptedClock

ORIGIN = JournalHeader(
    schema_version=JOURNAL_VERSION,
    key="low",
    fingerprint="f",
    rank=1,
    num_processes=2,
    experiment_id="0007",
    sample_ids=(1, 2),
)


def sampler_on(clock: ScriptedClock) -> LoadSampler:
    """CPUs that are half busy; a GPU that cannot be opened."""
    return LoadSampler(
        [partial(unavailable, "no driver")],
        clock,
        0.5,
        lambda: (clock.now_s(), 2 * clock.now_s()),
        lambda: 1000,
        lambda: (300, 400),
    )


def test_each_window_is_a_line_of_the_journal_and_an_entry_of_the_file(tmp_path: Path) -> None:
    clock = ScriptedClock()
    sampler = sampler_on(clock)
    with Journal(tmp_path, ORIGIN) as journal:
        for with_timeline, seconds in ((False, 1.2), (True, 0.4)):
            with load_noted(sampler, journal, ORIGIN, with_timeline):
                clock.sleep(seconds)
        path = journal.path
    content = read_journal(path)
    assert content is not None
    first, second = loads_of(content.every(SettingLoad))
    assert (first.rank, first.experiment_id, first.window_s) == (1, "0007", pytest.approx(1.2))
    # At 0.5, 1.0 and 1.2 s.
    assert (first.num_samples, first.sample_interval_s) == (3, 0.5)
    assert first.cpu_usage_percent == pytest.approx(50.0)
    assert (first.gpu_utilization_percent, first.reason) == ([None], "no driver")
    assert first.cpu_memory_usage_bytes_max == 1000
    assert second.window_s == pytest.approx(0.4)
    (timeline,) = timelines_of(content.every(SettingLoad)) or ()
    assert timeline.content() == {
        "rank": 1,
        "experiment_id": "0007",
        "interval_s": 0.5,
        "samples": [
            {
                "seconds": pytest.approx(0.4),
                "allocated_bytes": 300,
                "reserved_bytes": 400,
                "process_rss_bytes": 1000,
            }
        ],
    }


@pytest.mark.parametrize("error", [OutOfMemory("too large"), Stopped("requested")])
def test_a_window_that_failed_or_was_stopped_is_kept(tmp_path: Path, error: Exception) -> None:
    clock = ScriptedClock()

    def attempt() -> None:
        clock.sleep(0.7)
        raise error

    with Journal(tmp_path, ORIGIN) as journal:
        with pytest.raises(type(error)), load_noted(sampler_on(clock), journal, ORIGIN, False):
            attempt()
        content = read_journal(journal.path)
    assert content is not None
    (load,) = content.every(SettingLoad)
    assert load.trace.samples[-1].at_s == pytest.approx(0.7)


def test_without_a_window_or_a_request_there_is_none() -> None:
    assert (loads_of(()), timelines_of(())) == ([], None)
    trace = LoadTrace((LoadSample(0.5, 0.5, 10.0, (), 5, None, None),), 0.5, "no GPU is used")
    loads = [SettingLoad("0001", 0, trace, False)]
    assert timelines_of(loads) is None and len(loads_of(loads)) == 1
