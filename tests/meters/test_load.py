"""Load and memory of scripted GPUs and hosts along scripted windows, and once of this machine."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest

from experiment_core_utils.meters.load import LoadSampler, load_sampler, unavailable
from experiment_core_utils.primitives.clock import Clock, HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable
from experiment_core_utils.records.compute import memory_timeline, utilisation_of
from tests.scripted.simulated_meters import ScriptedClock


class Busy:
    """Says its script, one figure a reading; None is a reading that fails."""

    def __init__(self, *script: float | None) -> None:
        self._script = iter(script)

    def __call__(self) -> float:
        known = next(self._script)
        if known is None:
            raise MeterUnavailable("lost")
        return known


def cpus(clock: ScriptedClock, busy: Callable[[float], float]) -> Callable[[], tuple[float, float]]:
    """Two CPUs: `busy` seconds of 2 seconds a second."""
    return lambda: (busy(clock.now_s()), 2 * clock.now_s())


def growing(*values: int) -> Callable[[], int]:
    script: Iterator[int] = iter(values)
    return lambda: next(script)


def test_a_windows_means_are_weighted_by_time() -> None:
    clock = ScriptedClock(10.0)
    # Busy for 0.5 s of each second until 11, then all of the time of one CPU; so 25 %, then 50 %.
    busy = cpus(clock, lambda now: 0.5 * now if now < 11 else 0.5 * 11 + (now - 11))
    sampler = LoadSampler(
        [Busy(40.0, 80.0, 20.0), Busy(0.0, 0.0, 0.0)],
        clock,
        1.0,
        busy,
        growing(100, 300, 200),
        lambda: (7, 9),
    )
    with sampler:
        clock.sleep(2.5)
    found = utilisation_of(sampler.trace)
    # Samples at 1, 2 and 2.5 s stand for 1, 1 and 0.5 s.
    assert found["gpu_utilization_percent"] == [(40 + 80 + 10) / 2.5, 0.0]
    assert found["gpu_utilization_percent_max"] == [80.0, 0.0]
    assert found["cpu_usage_percent"] == pytest.approx((25 + 50 + 0.5 * 50) / 2.5)
    assert found["cpu_usage_percent_max"] == pytest.approx(50.0)
    assert found["cpu_memory_usage_bytes"] == (100 + 300 + 100) / 2.5
    assert found["cpu_memory_usage_bytes_max"] == 300
    assert (found["num_samples"], found["sample_interval_s"], found["reason"]) == (3, 1.0, None)
    timeline = memory_timeline(sampler.trace)
    assert timeline.interval_s == 1.0
    assert timeline.samples == [
        {"seconds": at_s, "allocated_bytes": 7, "reserved_bytes": 9, "process_rss_bytes": rss}
        for at_s, rss in ((1.0, 100), (2.0, 300), (2.5, 200))
    ]


def test_a_window_shorter_than_the_interval_has_the_sample_at_its_end() -> None:
    clock = ScriptedClock()
    sampler = LoadSampler([Busy(30.0)], clock, 1.0, cpus(clock, lambda now: now), growing(5))
    with sampler:
        clock.sleep(0.25)
    (sample,) = sampler.trace.samples
    assert (sample.at_s, sample.span_s, sample.cpu_percent, sample.gpu_percent) == (0.25, 0.25, 50.0, (30.0,))
    assert (sample.allocated_bytes, sample.reserved_bytes) == (None, None)


def test_a_gpu_that_does_not_tell_has_no_figure_and_a_reason() -> None:
    clock = ScriptedClock()
    numbers = count(1)
    sampler = LoadSampler(
        [partial(unavailable, "no such driver"), Busy(None, 50.0)],
        clock,
        1.0,
        lambda: (0.0, next(numbers)),
        growing(1, 1),
    )
    with sampler:
        clock.sleep(1.5)
    found = utilisation_of(sampler.trace)
    # Of the second GPU only the last half second is known.
    assert found["gpu_utilization_percent"] == [None, 50.0]
    assert found["gpu_utilization_percent_max"] == [None, 50.0]
    assert found["reason"] == "no such driver; lost"
    assert found["cpu_usage_percent"] == 0.0


def test_cpus_that_counted_no_time_have_no_figure() -> None:
    clock = ScriptedClock()
    sampler = LoadSampler([], clock, 1.0, lambda: (3.0, 8.0), growing(1))
    with sampler:
        clock.sleep(0.001)
    found = utilisation_of(sampler.trace)
    assert (found["cpu_usage_percent"], found["cpu_usage_percent_max"]) == (None, None)
    assert (found["gpu_utilization_percent"], found["reason"]) == ([], "no GPU is used")


def test_a_window_can_be_opened_again_and_must_have_been_closed() -> None:
    clock = ScriptedClock()
    sampler = LoadSampler([], clock, 1.0, lambda: (0.0, clock.now_s()), lambda: 1)
    with pytest.raises(ConfigurationError, match="was never closed"):
        _ = sampler.trace
    for seconds, samples in ((3.5, 4), (1.5, 2)):
        with sampler:
            clock.sleep(seconds)
        assert len(sampler.trace.samples) == samples
    clock.sleep(5.0)
    assert len(sampler.trace.samples) == 2


def test_what_fails_in_the_window_is_not_swallowed() -> None:
    clock = ScriptedClock()
    sampler = LoadSampler([], clock, 1.0, lambda: (0.0, clock.now_s()), lambda: 1)
    with pytest.raises(ValueError, match="the run"), sampler:
        raise ValueError("the run")
    clock.sleep(5.0)
    assert len(sampler.trace.samples) == 1


@pytest.mark.parametrize("clock", [ScriptedClock(), HostClock()])
def test_a_fault_of_the_program_in_a_sample_is_raised_at_the_end(clock: Clock) -> None:
    def read_rss() -> int:
        raise ZeroDivisionError("a slip")

    with pytest.raises(ZeroDivisionError, match="a slip"), LoadSampler([], clock, 0.001, read_rss=read_rss):
        clock.sleep(0.05)


def test_this_machine_is_sampled_beside_the_running_code() -> None:
    sampler = load_sampler()
    with sampler:
        HostClock().sleep(0.3)
    found = utilisation_of(sampler.trace)
    assert found["num_samples"] >= 2
    assert found["cpu_memory_usage_bytes_max"] >= found["cpu_memory_usage_bytes"] > 10_000_000
    assert sampler.trace.samples[-1].at_s >= 0.3
