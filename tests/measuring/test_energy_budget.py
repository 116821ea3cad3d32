"""The division of a budget among windows, by hand."""

from dataclasses import replace

import pytest

from experiment_core_utils.measuring.energy_budget import CounterTicks, EnergyBudget, WindowPlan
from experiment_core_utils.records.requests import RequestShape
from tests.hand_made_records import measured_sample, staged_run

CPU = CounterTicks(0.001, 0.0, 0.0005)
GPU = CounterTicks(0.1, 0.0, 0.0005)


def test_a_fifth_of_the_run_is_for_energy() -> None:
    """Runs of 0.5 s with a picture of 0.25 s, and of 0.25 s without one; requests are prepared in 20 ms and 40 ms."""
    shape = RequestShape(None, None, 0, 0, 4, 0.02)
    first = replace(measured_sample(1, staged_run(0.25, 0.25, ()), staged_run(0.25, 0.25, ())), shape=shape)
    second = replace(measured_sample(2, staged_run(None, 0.25, ())), shape=replace(shape, preprocess_s=0.04))
    untimed = replace(measured_sample(3), runs=(), shape=replace(shape, preprocess_s=9.0))
    measured = {"own": [first, untimed], "low": [second], "failed": []}
    assert EnergyBudget.of_run(10.0, measured) == EnergyBudget(2.0, 0.5, 0.04)
    # A run that was resumed at its end has taken at least its 1.25 s of requests.
    assert EnergyBudget.of_run(0.1, measured).seconds == pytest.approx(0.25)


def test_ten_seconds_of_rounds_give_four_settings_two_windows_of_a_quarter_second() -> None:
    """Of 0.25 s half a tick is waited for at each end; 0.249 / 0.06 are four requests, of 0.125 s they were two."""
    plan = EnergyBudget(2.0, 0.05, 0.01).plan(2.0, 4, 52, 6, CPU)
    assert plan == WindowPlan(2, 4, pytest.approx(0.005), 0.001, False)  # type: ignore[arg-type]
    # Once its requests are ready 0.21 s are left of a window's part, or nothing.
    assert plan is not None and plan.goal(0.21).length_s(0.001) == pytest.approx(0.209)
    assert plan.goal(-1.0).length_s(0.001) == pytest.approx(0.005)


def test_requests_shorter_than_a_tick_have_windows_between_two_ticks() -> None:
    """8 s for nine settings on a GPU whose counter advances every 100 ms: 0.444 s a window, of which 0.1 s are waited
    and 0.05 s warmed up; a quarter of 0.294 s is for nine requests that take 5 and 3 ms."""
    budget = EnergyBudget(8.0, 0.003, 0.005)
    plan = budget.plan(8.0, 9, 52, 6, GPU)
    assert plan == WindowPlan(2, 9, pytest.approx(0.028 / 0.2), pytest.approx(0.15), True)  # type: ignore[arg-type]
    # Four settings have twice the passes; a quarter of 0.35 s is for ten requests.
    assert budget.plan(8.0, 4, 52, 6, GPU) == replace(plan, num_passes=4, num_samples=10, least_s=pytest.approx(0.155))
    assert budget.plan(2.0, 9, 52, 6, GPU) is None


def test_a_long_run_has_the_windows_of_requested_energy() -> None:
    """Six windows of 32 requests of 0.1 s, in which a tick of 0.1 s is 2 %."""
    plan = EnergyBudget(600.0, 0.1, 0.0).plan(600.0, 4, 32, 6, GPU)
    assert plan == WindowPlan(6, 32, pytest.approx(0.5), 0.1, False)  # type: ignore[arg-type]
    assert plan is not None and plan.goal(25.0).length_s(0.1) == pytest.approx(5.0)
    assert plan.goal(0.2).length_s(0.1) == pytest.approx(0.5)


def test_two_samples_are_enough_where_there_are_no_more() -> None:
    """4 s for one setting: four windows of a second have two of 0.4 s."""
    budget = EnergyBudget(4.0, 0.4, 0.0)
    found = [budget.plan(4.0, 1, number, 6, CPU) for number in (2, 12)]
    assert [each and (each.num_passes, each.num_samples) for each in found] == [(4, 2), (2, 4)]
