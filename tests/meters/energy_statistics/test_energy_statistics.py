"""Bounds, uncertainties, sums, idle shares and closure, with the arithmetic in view."""

import math
from dataclasses import replace

import pytest

from experiment_core_utils.meters.energy_statistics import (
    aligned_bound_j,
    closure,
    combined_uncertainty,
    energy_figure,
    expanded_interval,
    mean_idle,
    quantisation_bound_j,
    summed_act,
    summed_reading,
)
from experiment_core_utils.meters.windows import WindowGoal
from experiment_core_utils.records.energy import ActEnergy, DeviceEnergy, EnergyFigure, EnergyOrigin, IdlePower


def origin(device: str = "GPU-0", source: str = "nvml_counter") -> EnergyOrigin:
    return EnergyOrigin(device, "gpu", source, "measured", "counter")  # type: ignore[arg-type]


def act(
    joules: float | None, bound_j: float | None = 0.0, device: str = "GPU-0", reason: str | None = None
) -> ActEnergy:
    return ActEnergy(origin(device), joules, bound_j, 0.5, 10.0, 5.0, "ticks", reason)


def idle(watts: float | None, bound_w: float | None) -> IdlePower:
    return IdlePower(origin(), watts, bound_w, 5.0, None)


def test_bounds_and_the_window_that_an_error_needs() -> None:
    assert quantisation_bound_j(0.1, 300.0) == pytest.approx(30.0)
    # 300 W for 4 and 6 ms of poll and one act of 10 ms.
    assert aligned_bound_j(0.004, 0.006, 0.01, 300.0) == pytest.approx(6.0)
    # A tick of 100 ms is 2 % of 5 s and 1 % of 10 s.
    assert WindowGoal(0.02).length_s(0.1) == pytest.approx(5.0)
    assert WindowGoal(0.01).length_s(0.1) == pytest.approx(10.0)


def test_uncertainties_add_in_squares() -> None:
    # s^2 of 9, 10, 11 is 1, over 3 repeats 1/3; bound 0.5, baseline 0.2: sqrt(0.3333 + 0.25 + 0.04).
    assert combined_uncertainty([9.0, 10.0, 11.0], 0.5, 0.2) == pytest.approx(math.sqrt(1 / 3 + 0.25 + 0.04))
    assert combined_uncertainty([9.0], 0.5) is None


def test_devices_are_summed_and_one_that_is_missing_takes_the_sum_with_it() -> None:
    parts = [DeviceEnergy(origin("GPU-0"), 10.0, 1.0, None), DeviceEnergy(origin("GPU-1"), 20.0, 2.0, None, "wrapped")]
    assert summed_reading(parts) == DeviceEnergy(origin("all"), 30.0, 3.0, None, "GPU-1: wrapped")
    gone = DeviceEnergy(origin("GPU-1"), None, None, "GPU is lost")
    assert summed_reading([parts[0], gone]) == DeviceEnergy(origin("all"), None, None, "GPU-1: GPU is lost")
    assert summed_reading(parts[:1]) == parts[0]
    whole = summed_act([act(3.0, 0.1, "GPU-0"), act(4.0, 0.2, "GPU-1")])
    assert (whole.origin.device, whole.joules, whole.act_s, whole.count) == ("all", 7.0, 0.5, 10.0)
    assert whole.bound_j == pytest.approx(0.3)


def test_sources_are_not_added_up() -> None:
    two = [DeviceEnergy(origin(source=source), 10.0, 1.0, None) for source in ("nvml_counter", "rapl")]
    with pytest.raises(ValueError, match="different sources"):
        summed_reading(two)


def test_a_figure_is_gross_idle_and_net_with_their_uncertainties() -> None:
    windows = [act(joules, 0.3) for joules in (99.0, 100.0, 101.0, 100.0, 100.0)]
    figure = energy_figure(windows, idle(70.0, 1.0), idle(74.0, 1.5))
    assert figure.gross_j is not None
    assert (figure.gross_j.mean, figure.num_windows, figure.count, figure.window_s) == (100.0, 5, 50.0, 25.0)
    # s^2 = (1 + 1) / 4 = 0.5; over 5 windows 0.1; t(4) = 2.7764.
    assert figure.gross_j.ci_high == pytest.approx(100 * math.exp(2.7764451 * math.sqrt(0.1) / 100))
    assert figure.uncertainty_j == pytest.approx(math.sqrt(0.1 + 0.09))
    # Idle: 72 W over 0.5 s. Drift 2 W and bound 1.5 W are 2.5 W, 1.25 J.
    assert (figure.idle_w, figure.idle_j, figure.net_j) == (72.0, 36.0, 64.0)
    assert figure.net_uncertainty_j == pytest.approx(math.sqrt(0.1 + 0.09 + 1.25**2))


def test_idle_power_of_which_a_bound_is_unknown_has_no_uncertainty() -> None:
    """The mean of the readings that there are, whichever of them lacks its bound; without a reading nothing."""
    assert mean_idle([idle(70.0, 1.0), idle(74.0, None), None]) == (72.0, None)
    assert mean_idle([idle(70.0, None), idle(74.0, 1.5)]) == (72.0, None)
    assert mean_idle([idle(70.0, 1.0), idle(None, None)]) == (70.0, 1.0)
    assert mean_idle([None, idle(None, 1.0)]) == (None, None)
    figure = energy_figure([act(99.0), act(101.0)], idle(70.0, 1.0), idle(74.0, None))
    assert (figure.idle_j, figure.net_j, figure.net_uncertainty_j) == (36.0, 64.0, None)
    assert figure.uncertainty_j == pytest.approx(1.0)


def test_net_energy_is_not_clamped() -> None:
    figure = energy_figure([act(30.0), act(30.0)], idle(80.0, 0.0))
    assert (figure.idle_w, figure.net_j) == (80.0, -10.0)


def test_windows_without_a_figure_are_counted_with_the_reason() -> None:
    figure = energy_figure([act(10.0), act(None, None, reason="GPU is lost"), act(12.0)])
    assert figure.gross_j is not None and figure.gross_j.mean == 11.0
    assert (figure.num_windows, figure.reason) == (2, "1 of 3 windows gave no figure: GPU is lost")
    assert (figure.idle_w, figure.idle_j, figure.net_j) == (None, None, None)
    nothing = energy_figure([act(None, None, reason="GPU is lost")], idle(70.0, 1.0))
    assert (nothing.gross_j, nothing.uncertainty_j, nothing.net_j, nothing.count) == (None, None, None, None)
    assert nothing.reason == "1 of 1 window gave no figure: GPU is lost"


def test_remarks_of_windows_are_counted() -> None:
    wrapped = replace(act(12.0), remark="it wrapped")
    assert energy_figure([act(10.0), wrapped, wrapped]).remark == "2 of 3 windows: it wrapped"
    assert energy_figure([act(10.0), act(11.0)]).remark is None


def test_without_a_bound_there_is_no_uncertainty() -> None:
    figure = energy_figure([act(10.0, None), act(11.0, None)])
    assert figure.gross_j is not None and figure.uncertainty_j is None


def figure_of(*joules: float) -> EnergyFigure:
    return energy_figure([act(each, 0.0) for each in joules])


def test_closure_is_the_whole_less_the_stages() -> None:
    # 10 + 30 + 8 J are 48 J; the whole is 50 J.
    stages = {"vision": figure_of(9.0, 11.0), "prefill": figure_of(30.0, 30.0), "decode": figure_of(8.0, 8.0)}
    found = closure(figure_of(49.0, 51.0), stages)
    assert (found.end_to_end_j, found.stages_j, found.residual_j, found.residual_share) == (50.0, 48.0, 2.0, 0.04)
    # s^2 / n is 2 / 2 for the whole and for vision, 0 for the others.
    assert found.uncertainty_j == pytest.approx(math.sqrt(2.0))
    # Stages that cost more than the whole leave a residual below 0.
    assert closure(figure_of(40.0, 40.0), stages).residual_j == -8.0


def test_closure_with_a_stage_missing_says_which() -> None:
    missing = energy_figure([act(None, None, reason="GPU is lost")])
    found = closure(figure_of(50.0, 50.0), {"vision": missing})
    assert (found.stages_j, found.residual_j, found.residual_share) == (None, None, None)
    assert found.reason == "vision: 1 of 1 window gave no figure: GPU is lost"


def test_the_expanded_interval_by_hand() -> None:
    # Three windows, t of 2 degrees 4.302653: s / sqrt(n) is 1. u^4 = 5 leaves 2 * 5 = 10 degrees: t 2.228139.
    low, high = expanded_interval(50.0, 4.302653, 3, 5**0.25)
    assert (50.0 - low, high - 50.0) == (pytest.approx(2.228139 * 5**0.25), pytest.approx(2.228139 * 5**0.25))
    # Spread alone is Student's t; a bound alone is the normal's.
    assert expanded_interval(50.0, 4.302653, 3, 1.0) == pytest.approx((50 - 4.302653, 50 + 4.302653))
    assert expanded_interval(50.0, 0.0, 3, 1.0) == pytest.approx((50 - 1.959964, 50 + 1.959964))
