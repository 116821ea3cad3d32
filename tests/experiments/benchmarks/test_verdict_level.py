"""The simulated machines, by hand."""

import numpy as np
import pytest

from experiments.benchmarks.simulated_runs import World, measured, speed


def test_what_changes_slowly_is_common_to_a_round() -> None:
    """The same requests on a steady machine and on one whose speed drifts by 20 % in 200 s: 12 settings take 1 s."""
    steady, drifting = (
        measured(world, 50, np.random.default_rng(1)) for world in (World("steady"), World("slow", drift=(0.2, 200.0)))
    )
    gaps = drifting - steady
    assert np.abs(gaps).mean() > 0.02 and gaps.mean(axis=1).std() < 0.005


def test_speed_changes_as_much_as_it_should() -> None:
    generator = np.random.default_rng(2)
    drift = speed(World("drift", drift=(0.05, 2.0)), 20_000.0, generator)
    assert drift.std() == pytest.approx(0.05, rel=0.1)
    # One second of four, on average, and in it 1.35 times as long.
    bursts = speed(World("bursts", bursts=(1.35, 15.0)), 20_000.0, generator)
    assert set(np.unique(bursts)) == {0.0, np.log(1.35)} and (bursts > 0).mean() == pytest.approx(0.25, abs=0.06)
