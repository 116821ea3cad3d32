"""The guardrail: settings that are predicted to meet a budget, and how often such predictions fail."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.statistics import fraction_above, fraction_of, percentiles_over_runs
from experiments.analyses.latency.estimator import LatencyEstimator
from experiments.analyses.latency.features import RequestSetting

MARGINS = (-0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
# Budgets that the margin is evaluated at: these percentiles of the measured total times.
BUDGET_PERCENTILES = tuple(range(10, 100, 10))
# The relative error and the fraction of broken budgets that are good enough.
AIM = 0.05


@dataclass(frozen=True)
class BudgetGuardrail:
    """Keeps requests within a budget by what an estimator predicts of them."""

    estimator: LatencyEstimator

    def filter_by_budget(
        self, settings: Sequence[RequestSetting], budget_ms: float, margin: float = 0.0
    ) -> list[RequestSetting]:
        """Settings whose predicted `T_total` times (1 + margin) is within the budget, in the order given.

        A setting with a knob outside the values that were measured is not admitted: what it takes is not known.

        Args:
            settings: each with the output tokens that are expected of it, or their limit; the true ones are not known
                before the answer is there.
            margin: fraction of the prediction that is kept free; negative lets predictions over the budget pass.

        Raises:
            ConfigurationError: a budget that is not above 0, a margin of -1 or less, or no output tokens.
        """
        if not budget_ms > 0.0 or not margin > -1.0:
            raise ConfigurationError(
                f"a budget of {budget_ms:g} ms with a margin of {margin:g} is not possible; give a budget above 0 and "
                "a margin above -1"
            )
        if not settings:
            return []
        predicted = self.estimator.predict(settings)
        total = predicted.times["T_total"]
        if np.isnan(total).any():
            raise ConfigurationError(
                "a setting has no output tokens, so its total time is not known; give them, or those expected"
            )
        fits = is_admitted(total, budget_ms, margin) & ~predicted.unseen_knobs
        return [setting for setting, each in zip(settings, fits, strict=True) if each]


def is_admitted(predicted_ms: np.ndarray, budget_ms: float, margin: float) -> np.ndarray:
    """Whether each prediction [S] with its margin is within the budget."""
    return predicted_ms * (1.0 + margin) <= budget_ms


@dataclass(frozen=True)
class GuardrailCounts:
    """The effects of a margin, summed over budgets; a case is a sample at a budget.

    A case of which a part of the runs took longer than the budget is a violation by that part, and fits by the rest.
    """

    margin: float
    cases: int
    admitted: int  #: cases
    violations: float  #: cases that were admitted and took longer than the budget
    fitting: float  #: cases that were within the budget as measured
    false_rejections: float  #: cases of these that were not admitted
    violation_rate: float | None  #: violations / admitted; None where none was admitted
    false_rejection_rate: float | None  #: false_rejections / fitting; None where none fits


def guardrail_counts(
    predicted_ms: np.ndarray, measured_ms: np.ndarray, budgets_ms: Sequence[float], margin: float
) -> GuardrailCounts:
    """The counts of the guardrail, of predictions [S] and the runs [R, S] of these samples, at every budget."""
    admitted = np.stack([is_admitted(predicted_ms, budget, margin) for budget in budgets_ms])
    late = np.stack([fraction_above(measured_ms, budget) for budget in budgets_ms])
    num_admitted, num_fitting = int(admitted.sum()), float((1 - late).sum())
    violations, rejected = float(late[admitted].sum()), float((1 - late)[~admitted].sum())
    return GuardrailCounts(
        margin=margin,
        cases=admitted.size,
        admitted=num_admitted,
        violations=violations,
        fitting=num_fitting,
        false_rejections=rejected,
        violation_rate=fraction_of(violations, num_admitted),
        false_rejection_rate=fraction_of(rejected, num_fitting),
    )


def guardrail_curve(predicted_ms: np.ndarray, measured_ms: np.ndarray) -> list[GuardrailCounts]:
    """The guardrail's figures for each of MARGINS, at budgets that are percentiles of all runs [R, S]."""
    budgets = percentiles_over_runs(measured_ms, BUDGET_PERCENTILES)
    return [guardrail_counts(predicted_ms, measured_ms, budgets, margin) for margin in MARGINS]
