"""Counts of the guardrail by hand, and what it admits."""

import numpy as np
import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.latency.features import RequestSetting
from experiments.analyses.latency.guardrail import BudgetGuardrail, guardrail_counts, guardrail_curve
from tests.experiments.analyses.latency.synthetic_samples import working_estimator

# 0.2 + 0.5 a block for each of 20 steps: about 120 ms with 12 blocks and 160 ms with 16, and 20 to 40 ms before.
SMALL, LARGE = (
    RequestSetting(288, 1, 12, {"top_k": 4, "num_active_blocks": 12}, 21),
    RequestSetting(288, 1, 12, {"top_k": 4, "num_active_blocks": 16}, 21),
)


def guardrail() -> BudgetGuardrail:
    return BudgetGuardrail(working_estimator())


def test_counts_by_hand() -> None:
    predicted, measured = np.array([90.0, 100.0, 120.0, 80.0]), np.array([[95.0, 110.0, 100.0, 130.0]])
    found = guardrail_counts(predicted, measured, [100.0], 0.0)
    # Admitted: 90, 100, 80; of these 110 and 130 took longer. Within the budget: 95 and 100; of these 120 was refused.
    assert (found.cases, found.admitted, found.violations, found.fitting, found.false_rejections) == (4, 3, 2, 2, 1)
    assert found.violation_rate == pytest.approx(2 / 3) and found.false_rejection_rate == 0.5
    # With a margin of a fifth 90 becomes 108 and 80 becomes 96: only the last is admitted, and it breaks the budget.
    found = guardrail_counts(predicted, measured, [100.0], 0.2)
    assert (found.admitted, found.violations, found.false_rejections) == (1, 1, 2)
    assert guardrail_counts(predicted, measured, [10.0], 0.0).violation_rate is None
    assert guardrail_counts(predicted, measured, [100.0, 1000.0], 0.0).cases == 8


def test_a_sample_is_late_by_the_part_of_its_runs_that_is() -> None:
    """Of two samples that are admitted at 100 ms one run in four, and one in two, takes 120 ms."""
    nan = np.nan
    runs = np.array([[90.0, 120.0, 90.0], [90.0, 90.0, nan], [120.0, nan, nan], [90.0, nan, nan]])
    found = guardrail_counts(np.array([95.0, 95.0, 105.0]), runs, [100.0], 0.0)
    assert (found.admitted, found.violations, found.violation_rate) == (2, 0.75, 0.375)
    assert (found.fitting, found.false_rejections, found.false_rejection_rate) == (2.25, 1.0, 1 / 2.25)


def test_a_perfect_prediction_without_margin_makes_no_mistake() -> None:
    times = np.linspace(50.0, 150.0, 40)
    without = next(each for each in guardrail_curve(times, times[None]) if each.margin == 0.0)
    assert (without.violations, without.false_rejections) == (0, 0)
    curve = guardrail_curve(times, times[None])
    assert [each.admitted for each in curve] == sorted((each.admitted for each in curve), reverse=True)


def test_settings_within_the_budget_are_admitted_in_order() -> None:
    total = guardrail().estimator.predict([SMALL, LARGE]).times["T_total"]
    between = float(total.mean())
    assert guardrail().filter_by_budget([LARGE, SMALL], between) == [SMALL]
    assert guardrail().filter_by_budget([LARGE, SMALL], float(total[1]) + 1e-6) == [LARGE, SMALL]
    assert guardrail().filter_by_budget([LARGE, SMALL], between, margin=1.0) == []
    assert guardrail().filter_by_budget([LARGE, SMALL], between, margin=-0.5) == [LARGE, SMALL]
    assert guardrail().filter_by_budget([], between) == []


def test_a_knob_that_was_not_measured_is_not_admitted() -> None:
    unseen = RequestSetting(288, 1, 12, {"top_k": 2, "num_active_blocks": 12}, 21)
    assert guardrail().filter_by_budget([unseen, SMALL], 1e9) == [SMALL]


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a budget of 0 ms with a margin of 0 is not possible"):
        guardrail().filter_by_budget([SMALL], 0.0)
    with pytest.raises(ConfigurationError, match="margin of -1 is not possible"):
        guardrail().filter_by_budget([SMALL], 100.0, -1.0)
    with pytest.raises(ConfigurationError, match="no output tokens"):
        guardrail().filter_by_budget([RequestSetting(288, 1, 12, {"top_k": 4, "num_active_blocks": 12})], 100.0)
