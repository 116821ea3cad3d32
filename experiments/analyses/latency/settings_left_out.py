"""Predictions of settings that were left out of a fit, and the choice of each stage's form by them."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from experiments.analyses.latency.features import STAGES, RequestColumns, TimedSamples
from experiments.analyses.latency.stage_regression import (
    FORMS,
    PREDICTED,
    StageForm,
    fit_stages,
    measured_times,
    stage_times,
    vision_times,
)
from experiments.fitting.held_out import left_out_masks, relative_error

Predict = Callable[[RequestColumns], Mapping[str, np.ndarray]]
FOLDS = 6
# A form replaces a simpler one where it is better by this fraction on settings left out.
CLEARLY_BETTER = 0.05


def predicted_left_out(
    samples: TimedSamples,
    fit: Callable[[TimedSamples], Predict],
    num_folds: int = FOLDS,
    groups: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """What `fit` without a fold's settings, or other groups [S], predicts for them: name -> [S] milliseconds."""
    found: dict[str, np.ndarray] = {}
    for which in left_out_masks(samples.knobs if groups is None else groups, num_folds):
        predict = fit(samples.take(~which))
        for name, column in predict(samples.requests.take(which)).items():
            found.setdefault(name, np.full(len(samples), np.nan))[which] = column
    return found


def choose_forms(samples: TimedSamples) -> dict[str, StageForm]:
    """The form of least relative error on settings left out for each stage; a simpler one where that is close."""
    measured = measured_times(samples)
    chosen: dict[str, StageForm] = {}
    for name in STAGES:
        best = math.inf
        before = dict(chosen)
        for form in FORMS[name]:
            predicted = predicted_left_out(samples, _fit_of_stage(name, before | {name: form}))
            error = relative_error(predicted.get(name), measured[name])
            if name not in chosen or error < best * (1 - CLEARLY_BETTER):
                best, chosen[name] = error, form
    return chosen


def _fit_of_stage(name: str, forms: Mapping[str, StageForm]) -> Callable[[TimedSamples], Predict]:
    """A function that fits a stage, and vision before it where its floor begins with the request."""
    needed = {name: forms[name]}
    if forms[name].runs_ahead:
        needed["T_vision_total"] = forms["T_vision_total"]

    def fit(part: TimedSamples) -> Predict:
        stages = fit_stages(part, needed)

        def predict(requests: RequestColumns) -> Mapping[str, np.ndarray]:
            if name not in stages:
                return {}
            is_ahead = forms[name].runs_ahead
            vision_ms = vision_times(stages, requests) if is_ahead else np.zeros(len(requests))
            return {name: stages[name].times(requests, vision_ms)}

        return predict

    return fit


def fit_chosen(part: TimedSamples) -> Predict:
    """The estimator without its intervals, its forms chosen by settings left out of these samples."""
    stages = fit_stages(part, choose_forms(part))
    return lambda requests: stage_times(stages, requests)


def ratios_left_out(samples: TimedSamples, forms: Mapping[str, StageForm]) -> dict[str, np.ndarray]:
    """Measured / predicted of samples whose setting was left out, by name of PREDICTED; without absent stages."""

    def fit(part: TimedSamples) -> Predict:
        stages = fit_stages(part, forms)
        return lambda requests: stage_times(stages, requests)

    predicted, measured = predicted_left_out(samples, fit), measured_times(samples)
    found = {}
    for name in PREDICTED:
        has = np.isfinite(measured[name]) & (predicted[name] > 0)
        found[name] = measured[name][has] / predicted[name][has]
    return found
