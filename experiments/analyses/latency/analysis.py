"""E3 of a sweep: how well latency is predicted, with the sentences of its command and the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiment_core_utils.primitives.errors import ConfigurationError, ResultsError
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import LEVEL, LatencyEstimator
from experiments.analyses.latency.features import (
    RUNS,
    TimedSamples,
    of_fewer_settings,
    of_several_runs,
    timed_samples,
)
from experiments.analyses.latency.guardrail import AIM, GuardrailCounts, guardrail_curve
from experiments.analyses.latency.recalibration import (
    RecalibrationStudy,
    refuse_other_model,
    study_by_order,
    study_of_target,
)
from experiments.analyses.latency.validation import Errors, Validation, validate
from experiments.analyses.sweeps import Sweep, runs_frame, samples_frame


@dataclass(frozen=True)
class LatencyModel:
    """What E3 finds."""

    samples: TimedSamples
    estimator: LatencyEstimator
    validation: Validation
    curve: Sequence[GuardrailCounts]  #: of requests whose answer's length is the expected one
    caveats: Sequence[AnalysisCaveat]  #: the estimator's, and which settings were left out where not all are in it

    @property
    def num_runs(self) -> int:
        """The number of runs that the samples are of."""
        return len(np.unique(self.samples.wholes[RUNS])) if RUNS in self.samples.wholes else 1


def analyse_latency(
    sweep: Sweep, samples: pd.DataFrame, level: float = LEVEL, further: Sequence[Sweep] = ()
) -> LatencyModel:
    """E3 of a sweep, whose frame of samples is given, and of further runs of the same, with intervals of this level.

    Raises:
        ResultsError: too few samples or settings.
        ConfigurationError: a level that is not between 0 and 1, or a further run of another model or device.
    """
    if not (samples["output_tokens"] > 0).any():
        raise ResultsError("no answer was generated, and the estimator is of requests that generate one")
    parts = [timed_samples(samples, runs_frame(sweep))]
    for other in further:
        refuse_other_model(sweep, other)
        one, two = (f"{run.device}, {run.how}" for run in (sweep.provenance, other.provenance))
        if one != two:
            raise ConfigurationError(
                f"the runs are of {one} and of {two}: one model of their times means nothing; give "
                "runs of one device, or the other as --target_dir"
            )
        parts.append(timed_samples(samples_frame(other), runs_frame(other)))
    timed, left_out = of_fewer_settings(of_several_runs(parts) if further else parts[0])
    estimator = LatencyEstimator(level).fit(timed)
    validation = validate(timed, level)
    curve = guardrail_curve(validation.totals["expected"], timed.run_totals)
    caveats = [*estimator.fitted.caveat_records, *([] if left_out is None else [left_out])]
    return LatencyModel(timed, estimator, validation, curve, caveats)


def recalibration_studies(sweep: Sweep, found: LatencyModel, target: Sweep | None) -> list[RecalibrationStudy]:
    """How well a recalibration works: to the target, or without one to the second half of the run, if it is one.

    Raises:
        ConfigurationError: the target is of another model.
    """
    if target is not None:
        return [study_of_target(found.estimator, sweep, target)]
    return [study_by_order(sweep, found.samples, found.estimator.level)] if found.num_runs == 1 else []


def prediction_sentences(found: LatencyModel) -> Iterator[str]:
    """How far predictions are off, and where a simpler model is nearer."""
    validation = found.validation
    estimator = validation.estimator["T_total"]
    linear, logs, forest = (
        100 * each["T_total"].setting_mape for each in (validation.linear, validation.logs, validation.forest)
    )
    noise = validation.noise.get("T_total")
    again = (
        "" if noise is None else f", and measuring the same samples again differs by {100 * noise.setting_mape:.1f} %"
    )
    runs = "one run" if found.num_runs == 1 else f"{found.num_runs} runs"
    yield (
        f"The total time of a setting that was left out of the fit is predicted with an error of {_percent(estimator)} "
        f"in {runs}; a line of the same terms has {linear:.1f} %, a model that adds in logs {logs:.1f} %, a random "
        f"forest {forest:.1f} %{again}."
    )
    whole_runs = validation.others.get(RUNS)
    if whole_runs is not None and whole_runs.reason is None:
        yield f"The total time in a run that was left out is {_percent(whole_runs.estimator['T_total'])} off."
    yield from _beaten_sentences(validation)


def _percent(found: Errors) -> str:
    """The error by setting in percent, with its interval."""
    between = found.setting_mape_ci95
    interval = "" if between is None else f" ({100 * between[0]:.1f} to {100 * between[1]:.1f})"
    return f"{100 * found.setting_mape:.1f} %{interval}"


# Smaller differences of errors than a tenth of a percent are not worth a sentence.
_SEEN = 0.001


def _beaten_sentences(validation: Validation) -> Iterator[str]:
    """The times for which the interval of a simpler model's error ends below the estimator's error."""
    for name, own in validation.estimator.items():
        rivals = {"the line": validation.linear[name], "the model that adds in logs": validation.logs[name]}
        best = min(rivals, key=lambda rival: rivals[rival].setting_mape)
        _, high = rivals[best].setting_mape_ci95 or (None, rivals[best].setting_mape)
        if high < own.setting_mape - _SEEN:
            yield f"{name} is predicted better by {best}: {_percent(rivals[best])} against {_percent(own)}."


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
