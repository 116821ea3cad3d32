"""In: how late requests shall seem to come, and a seed; out: the seconds to wait before each batch. No clock here."""

import numpy as np

from experiment_core_utils.primitives.text_config import LatencySimulation


def simulated_delays(num_batches: int, simulation: LatencySimulation, seed: int, process_index: int) -> list[float]:
    """Seconds to wait before each batch.

    Each batch waits a uniform time in [`delay_min`, `delay_max`]. With `simulate_burst`, the first batch of every burst
    of `burst_size` but the first waits `burst_interval` longer. All 0 where nothing is simulated.

    The n-th delay depends on the seed, the process and n only: `numpy.random.RandomState([seed, process_index])`,
    whose stream numpy keeps for ever.
    """
    if not simulation.simulate:
        return [0.0] * num_batches
    draws = np.random.RandomState([seed, process_index])
    delays = draws.uniform(simulation.delay_min, simulation.delay_max, num_batches)
    return [float(delay) + _before_burst(place, simulation) for place, delay in enumerate(delays)]


def _before_burst(place: int, simulation: LatencySimulation) -> float:
    begins = simulation.simulate_burst and place > 0 and place % simulation.burst_size == 0
    return simulation.burst_interval if begins else 0.0
