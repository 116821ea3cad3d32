"""The errors of the estimator and of a linear model at settings left out, beside the noise of measuring again.

Every prediction here is of a sample whose setting was in no step of the fit: forms, coefficients and intervals are
found again without each fold.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.estimator import MIN_SETTINGS, LatencyEstimator, Prediction
from experiments.analyses.latency.features import STAGES, RequestColumns, TimedSamples
from experiments.analyses.latency.settings_left_out import Predict, predicted_left_out
from experiments.analyses.latency.stage_regression import PREDICTED, measured_times
from experiments.fitting.folds import left_out_masks
from experiments.fitting.scores import deviations

OUTER_FOLDS = 8
_RESAMPLES = 200


@dataclass(frozen=True)
class Errors:
    """Errors of predictions against measurements, as fractions, not percent."""

    num_samples: int  #: that have both
    sample_mape: float  #: mean |predicted / measured - 1| over samples
    sample_median: float  #: median of the same
    setting_mape: float  #: mean over settings of |median predicted / median measured - 1| of the setting's samples
    bias: float  #: median of predicted / measured - 1


@dataclass(frozen=True)
class Repeatability:
    """The difference that measuring again would make; fractions, not percent."""

    #: mean |median of the setting's other samples / sample - 1|; crops and prompts differ among them
    sample_mape: float
    #: mean over settings of the deviation of a resampled median from the setting's median (bootstrap)
    setting_mape: float


@dataclass(frozen=True)
class Coverage:
    """The coverage of the intervals of samples whose setting was left out."""

    share: float  #: fraction of the samples that are inside
    width: float  #: median of (high - low) / predicted


@dataclass(frozen=True)
class Validation:
    """The results of a validation; keys of the mappings are names of PREDICTED that samples have."""

    left_out: Prediction  #: predictions with intervals, each sample's with its setting left out
    estimator: Mapping[str, Errors]  #: errors of these
    linear: Mapping[str, Errors]  #: errors of least squares on the plain features, settings left out in the same folds
    repeatability: Mapping[str, Repeatability]  #: what no model can be better than on these samples
    coverage: Mapping[str, Coverage]  #: of the intervals
    num_folds: int  #: among which settings were dealt out


def validate(samples: TimedSamples, level: float) -> Validation:
    """The validation of these samples; raises ResultsError where the settings are too few to leave some out."""
    num_settings = len(np.unique(samples.knobs))
    if num_settings <= MIN_SETTINGS:
        raise ResultsError(
            f"{num_settings} settings are too few to leave one out and fit the others; profile {MIN_SETTINGS + 1} or "
            "more"
        )
    num_folds = min(OUTER_FOLDS, num_settings)
    left_out = left_out_predictions(samples, level, num_folds)
    linear = predicted_left_out(samples, fit_linear, num_folds)
    measured = measured_times(samples)
    present = [name for name in PREDICTED if np.isfinite(measured[name]).any()]
    return Validation(
        left_out=left_out,
        estimator={name: errors(left_out.times[name], measured[name], samples.settings) for name in present},
        linear={name: errors(linear[name], measured[name], samples.settings) for name in present},
        repeatability={name: repeatability(measured[name], samples.settings) for name in present},
        coverage={name: coverage(left_out, name, measured[name]) for name in present},
        num_folds=num_folds,
    )


def left_out_predictions(samples: TimedSamples, level: float, num_folds: int) -> Prediction:
    """[S], of an estimator that was fitted without the sample's fold."""
    columns: dict[str, dict[str, np.ndarray]] = {
        which: {name: np.full(len(samples), np.nan) for name in PREDICTED} for which in ("times", "low", "high")
    }
    unseen, extrapolated = np.zeros(len(samples), dtype=bool), np.zeros(len(samples), dtype=bool)
    for which in left_out_masks(samples.knobs, num_folds):
        found = LatencyEstimator(level).fit(samples.take(~which)).predict(samples.requests.take(which))
        unseen[which], extrapolated[which] = found.unseen_knobs, found.extrapolated
        for name in PREDICTED:
            columns["times"][name][which] = found.times[name]
            columns["low"][name][which] = found.low[name]
            columns["high"][name][which] = found.high[name]
    return Prediction(columns["times"], columns["low"], columns["high"], unseen, extrapolated)


def fit_linear(samples: TimedSamples) -> Predict:
    """The linear model: ordinary least squares of each stage on the features as they are, with an intercept."""
    # Its import takes a second, and most commands need none of it.
    from sklearn.linear_model import LinearRegression

    columns = _plain_features(samples.requests)
    found: dict[str, LinearRegression] = {}
    for name in STAGES:
        has = np.isfinite(samples.times[name])
        if has.any():
            found[name] = LinearRegression().fit(columns[has], samples.times[name][has])

    def predict(requests: RequestColumns) -> Mapping[str, np.ndarray]:
        plain = _plain_features(requests)
        none = np.zeros(len(requests))
        stage = {name: found[name].predict(plain) if name in found else none for name in STAGES}
        vision = np.where(requests.vision_tokens > 0, stage["T_vision_total"], 0.0)
        decode = (requests.output_tokens - 1) * stage["T_decode_per_token"]
        first = vision + stage["T_LLM_prefill"]
        return {**stage, "T_LLM_decode": decode, "T_first_token": first, "T_total": first + decode}

    return predict


def _plain_features(requests: RequestColumns) -> np.ndarray:
    knobs = (requests.vision_tokens, requests.text_tokens, requests.top_k, requests.num_active_blocks)
    return np.stack([*knobs, requests.output_tokens], axis=1)


def errors(predicted: np.ndarray, measured: np.ndarray, settings: np.ndarray) -> Errors:
    """The errors over the samples that have both; there must be some."""
    has = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    predicted, measured, settings = predicted[has], measured[has], settings[has]
    relative = deviations(predicted, measured)
    per_setting = [
        abs(float(np.median(predicted[own]) / np.median(measured[own])) - 1) for own in places_by_setting(settings)
    ]
    return Errors(
        num_samples=len(relative),
        sample_mape=float(np.abs(relative).mean()),
        sample_median=float(np.median(np.abs(relative))),
        setting_mape=float(np.mean(per_setting)),
        bias=float(np.median(relative)),
    )


def repeatability(measured: np.ndarray, settings: np.ndarray) -> Repeatability:
    """The repeatability of settings with two samples or more; NaN samples are left out.

    Raises:
        ResultsError: no setting has two.
    """
    generator = np.random.default_rng(0)
    has = np.isfinite(measured) & (measured > 0)
    measured, settings = measured[has], settings[has]
    of_samples: list[float] = []
    of_settings: list[float] = []
    for own in places_by_setting(settings):
        times = measured[own]
        if len(times) < 2:
            continue
        of_samples += list(np.abs(_medians_of_others(times) / times - 1))
        drawn = np.median(generator.choice(times, size=(_RESAMPLES, len(times))), axis=1)
        of_settings.append(float(np.abs(drawn / np.median(times) - 1).mean()))
    if not of_samples:
        raise ResultsError("no setting has two samples with times, so their noise is not known; profile more samples")
    return Repeatability(float(np.mean(of_samples)), float(np.mean(of_settings)))


def places_by_setting(settings: np.ndarray) -> list[np.ndarray]:
    """Indices of the samples of each setting, settings in alphabetical order."""
    numbers, counts = np.unique(settings, return_inverse=True, return_counts=True)[1:]
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])


def _medians_of_others(times: np.ndarray) -> np.ndarray:
    """[n], the median of all but each one."""
    order = np.argsort(times, kind="stable")
    ranks = np.empty(len(times), dtype=np.int64)
    ranks[order] = np.arange(len(times))
    # Of n - 1 in order; those behind the one that is left out stand one place further.
    middle = np.array([[(len(times) - 2) // 2], [(len(times) - 1) // 2]])
    return np.asarray(times[order][middle + (middle >= ranks)].mean(axis=0))


def coverage(predicted: Prediction, name: str, measured: np.ndarray) -> Coverage:
    """The coverage of one time, over the samples that have it."""
    has = np.isfinite(measured) & (measured > 0)
    low, high = predicted.low[name][has], predicted.high[name][has]
    inside = (low <= measured[has]) & (measured[has] <= high)
    return Coverage(float(inside.mean()), float(np.median((high - low) / predicted.times[name][has])))
