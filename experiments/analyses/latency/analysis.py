"""E3 of a sweep: how well latency is predicted, with the sentences of its command and the report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiment_core_utils.records.setting_result import SettingResult
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import LEVEL, LatencyEstimator
from experiments.analyses.latency.features import TimedSamples, of_fewer_settings, timed_samples
from experiments.analyses.latency.guardrail import AIM, GuardrailCounts, guardrail_curve
from experiments.analyses.latency.recalibration import (
    RecalibrationStudy,
    study_by_order,
    study_of_synthetic,
    study_of_target,
)
from experiments.analyses.latency.validation import Validation, validate
from experiments.analyses.sweeps import Sweep, runs_frame


@dataclass(frozen=True)
class LatencyModel:
    """What E3 finds."""

    samples: TimedSamples
    estimator: LatencyEstimator
    validation: Validation
    curve: Sequence[GuardrailCounts]  #: of requests whose answer's length is the expected one
    drift: Mapping[str, float] | None  #: of the control setting over the run, see `control_drift`
    caveats: Sequence[AnalysisCaveat]  #: the estimator's, and which settings were left out where not all are in it


def analyse_latency(sweep: Sweep, samples: pd.DataFrame, level: float = LEVEL) -> LatencyModel:
    """E3 of a sweep, whose frame of samples is given, with intervals of this level.

    Raises:
        ResultsError: too few samples or settings.
        ConfigurationError: a level that is not between 0 and 1.
    """
    timed, left_out = of_fewer_settings(timed_samples(samples, runs_frame(sweep)))
    estimator = LatencyEstimator(level).fit(timed)
    validation = validate(timed, level)
    curve = guardrail_curve(validation.totals["expected"], timed.run_totals)
    drift = control_drift([each.result for each in sweep.settings])
    caveats = [*estimator.fitted.caveat_records, *([] if left_out is None else [left_out])]
    return LatencyModel(timed, estimator, validation, curve, drift, caveats)


def control_drift(results: Sequence[SettingResult]) -> dict[str, float] | None:
    """Spread of the control setting's time over the run, as multiples of its first reading; None without readings.

    `mean_deviation` is the mean of |ratio / median ratio - 1|: what the same setting differs by when it is measured
    again later.
    """
    ratios = [drift.before for result in results for drift in result.drift if drift.before is not None]
    if not ratios:
        return None
    median = float(np.median(ratios))
    deviation = float(np.abs(np.array(ratios) / median - 1).mean())
    return {"min": min(ratios), "median": median, "max": max(ratios), "mean_deviation": deviation}


def recalibration_studies(sweep: Sweep, found: LatencyModel, target: Sweep | None) -> list[RecalibrationStudy]:
    """How well a recalibration works: to the target, or without one to a part of the same run.

    Raises:
        ConfigurationError: the target is of another model.
    """
    if target is not None:
        return [study_of_target(found.estimator, sweep, target)]
    level = found.estimator.level
    return [study_by_order(sweep, found.samples, level), study_of_synthetic(found.samples, level)]


def latency_findings(found: LatencyModel) -> list[str]:
    """What the command prints."""
    caveats = (f"caveat: {each.sentence}" for each in found.caveats)
    return [*prediction_sentences(found), *budget_sentences(found), *caveats]


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
