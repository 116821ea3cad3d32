"""E3 of a sweep's samples: how well latency is predicted, with the sentences of its command and the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import LEVEL, LatencyEstimator
from experiments.analyses.latency.features import TimedSamples, of_fewer_settings, timed_samples
from experiments.analyses.latency.guardrail import AIM, GuardrailCounts, guardrail_curve
from experiments.analyses.latency.validation import Validation, validate


@dataclass(frozen=True)
class LatencyModel:
    """What E3 finds; `left_out` says of which settings, where not of all."""

    samples: TimedSamples
    estimator: LatencyEstimator
    validation: Validation
    curve: Sequence[GuardrailCounts]  #: of requests whose answer's length is the expected one
    left_out: AnalysisCaveat | None


def analyse_latency(frame: pd.DataFrame, level: float = LEVEL, runs: pd.DataFrame | None = None) -> LatencyModel:
    """E3 of the samples of a frame, with intervals of this level; `runs` of `sweeps.runs_frame` show their noise.

    Raises:
        ResultsError: too few samples or settings.
        ConfigurationError: a level that is not between 0 and 1.
    """
    samples, left_out = of_fewer_settings(timed_samples(frame, runs))
    estimator = LatencyEstimator(level).fit(samples)
    validation = validate(samples, level)
    curve = guardrail_curve(validation.totals["expected"], samples.times["T_total"])
    return LatencyModel(samples, estimator, validation, curve, left_out)


def prediction_sentences(found: LatencyModel) -> Iterator[str]:
    """How far predictions are off."""
    validation = found.validation
    estimator, linear, forest = (
        100 * each["T_total"].setting_mape for each in (validation.estimator, validation.linear, validation.forest)
    )
    noise = validation.noise.get("T_total")
    again = (
        "" if noise is None else f", and measuring the same samples again differs by {100 * noise.setting_mape:.1f} %"
    )
    yield (
        f"The total time of a setting that was left out of the fit is predicted with an error of {estimator:.1f} %; a "
        f"linear model has {linear:.1f} %, a random forest {forest:.1f} %{again}."
    )


def budget_sentences(found: LatencyModel) -> Iterator[str]:
    """What a margin that keeps broken budgets at AIM costs."""
    kept = [each for each in found.curve if each.violation_rate is not None and each.violation_rate <= AIM]
    if not kept:
        widest = 100 * found.curve[-1].margin
        yield f"No margin up to {widest:.0f} % keeps broken latency budgets at {100 * AIM:.0f} % or less."
        return
    rejected = "none" if kept[0].false_rejection_rate is None else f"{100 * kept[0].false_rejection_rate:.1f} %"
    broken = 100 * (kept[0].violation_rate or 0.0)
    yield (
        f"With a margin of {100 * kept[0].margin:+.0f} %, {broken:.1f} % of the requests that "
        f"the estimator admits break their latency budget, and {rejected} of those that would fit are rejected."
    )
