"""Predictions of settings that were left out of a fit."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments.analyses.latency.features import RequestColumns, TimedSamples
from experiments.analyses.latency.stage_regression import PREDICTED, fit_stages, measured_times, stage_times
from experiments.fitting.held_out import left_out_masks

Predict = Callable[[RequestColumns], Mapping[str, np.ndarray]]
FOLDS = 6


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


def fit_lines(samples: TimedSamples) -> Predict:
    """The estimator without its intervals."""
    stages = fit_stages(samples)
    return lambda requests: stage_times(stages, requests)


def ratios_left_out(samples: TimedSamples) -> dict[str, np.ndarray]:
    """Measured / predicted of samples whose setting was left out, by name of PREDICTED; without absent stages."""
    predicted, measured = predicted_left_out(samples, fit_lines), measured_times(samples)
    found = {}
    for name in PREDICTED:
        has = np.isfinite(measured[name]) & (predicted[name] > 0)
        found[name] = measured[name][has] / predicted[name][has]
    return found
