"""The simulation of verdicts: its machines and orders by hand, and the level of what E2 uses."""

import numpy as np
import pytest

from experiments.benchmarks.simulated_runs import WORLDS, Knobs, World, measured, speed
from experiments.benchmarks.verdict_level import accuracy_verdicts, wrong_and_found

BY_NAME = {world.name: world for world in WORLDS}


def test_a_steady_machine_gives_the_same_times_in_any_order() -> None:
    times = measured(World("steady"), Knobs.of(12), 10, np.random.default_rng(0))
    np.testing.assert_allclose(times["blocked"], times["steady"])
    np.testing.assert_allclose(times["rounds"], times["steady"])


def test_what_changes_slowly_is_common_to_a_round_and_not_to_a_block() -> None:
    times = measured(World("slow", drift=(0.2, 200.0)), Knobs.of(12), 50, np.random.default_rng(1))
    gaps = {name: (each - times["steady"]).mean(axis=1).std() for name, each in times.items()}
    assert gaps["blocked"] > 20 * gaps["rounds"]


def test_speed_changes_as_much_as_it_should() -> None:
    generator = np.random.default_rng(2)
    drift = speed(World("drift", drift=(0.05, 2.0)), 20_000.0, generator)
    assert drift.std() == pytest.approx(0.05, rel=0.1)
    # One second of four, on average, and in it 1.35 times as long.
    bursts = speed(World("bursts", bursts=(1.35, 15.0)), 20_000.0, generator)
    assert set(np.unique(bursts)) == {0.0, np.log(1.35)} and (bursts > 0).mean() == pytest.approx(0.25, abs=0.06)


def test_rounds_hold_their_level_and_find_what_blocks_do_not() -> None:
    for name in ("drift 5 %, 20 s", "3 questions a picture"):
        found = wrong_and_found(BY_NAME[name], 12, 51, 30, seed=3)
        # 5 % of 30, and three standard deviations.
        assert found["rounds"][0] <= 100 * 5 / 30
    found = wrong_and_found(BY_NAME["drift 5 %, 20 s"], 12, 50, 10, seed=3)
    assert found["blocked"][0] > 50 and found["rounds"][1] > 90 and found["rounds"][1] > found["blocked"][1]


def test_not_worse_is_not_said_of_settings_that_lose_the_margin() -> None:
    wrong, worse, kept = accuracy_verdicts(501, 1, 0.06, 0.02, 30, seed=4)
    assert wrong <= 100 * 5 / 30 + 5 and kept < 3 and worse > 10
    assert accuracy_verdicts(501, 1, 0.06, 0.0, 10, seed=4)[2] > 5
