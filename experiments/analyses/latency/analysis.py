"""E3 of a sweep's samples: what its command, the report and the notebook show of how well latency is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import LEVEL, LatencyEstimator
from experiments.analyses.latency.features import TimedSamples, of_fewer_settings, timed_samples
from experiments.analyses.latency.guardrail import GuardrailCounts, guardrail_curve
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
