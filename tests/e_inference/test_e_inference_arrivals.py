"""Simulated delays by hand."""

import pytest

from experiment_core_utils.config.text import LatencySimulation
from experiment_core_utils.measuring.text_shard import simulated_delays


def test_nothing_is_simulated_unless_requested() -> None:
    assert simulated_delays(3, LatencySimulation(delay_min=1.0, delay_max=2.0), 42, 0) == [0.0, 0.0, 0.0]


def test_a_constant_delay() -> None:
    assert simulated_delays(3, LatencySimulation(simulate=True, delay_min=0.5, delay_max=0.5), 42, 0) == [0.5] * 3


def test_bursts_of_two() -> None:
    simulation = LatencySimulation(
        simulate=True, delay_min=0.25, delay_max=0.25, simulate_burst=True, burst_interval=2.0, burst_size=2
    )
    # The interval stands before the third and the fifth batch, where bursts begin, not before the first.
    assert simulated_delays(5, simulation, 42, 0) == [0.25, 0.25, 2.25, 0.25, 2.25]


def test_drawn_delays_depend_on_seed_and_process_only() -> None:
    simulation = LatencySimulation(simulate=True, delay_min=1.0, delay_max=3.0)
    delays = simulated_delays(4, simulation, 42, 0)
    assert all(1.0 <= delay <= 3.0 for delay in delays)
    assert len(set(delays)) == 4
    assert simulated_delays(2, simulation, 42, 0) == delays[:2]
    assert simulated_delays(4, simulation, 43, 0) != delays != simulated_delays(4, simulation, 42, 1)
    # numpy.random.RandomState([42, 0]).uniform(1, 3), whose stream does not change between versions of numpy.
    assert delays[:2] == pytest.approx([2.4113707, 1.74981111])
