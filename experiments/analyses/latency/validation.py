"""The errors of the estimator and of three baselines at what was left out, beside the noise of measuring again.

Left out are settings, whole levels of a knob, whole pictures, and of several runs whole runs. No step of a fit sees
what it predicts: coefficients and intervals are found again without each fold. Decode and total are predicted
for the true length of the answer, as the error of a model of times; `Validation.totals` has totals without it, as an
admission needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiments.analyses.latency.estimator import MIN_SETTINGS, LatencyEstimator, Prediction
from experiments.analyses.latency.features import RUNS, STAGES, RequestColumns, TimedSamples, columns_of, identifiable
from experiments.analyses.latency.settings_left_out import Predict, fit_lines, predicted_left_out
from experiments.analyses.latency.stage_regression import (
    PREDICTED,
    STAGE_TERMS,
    after_vision,
    composed_times,
    measured_times,
)
from experiments.fitting.held_out import deviations, left_out_masks
from experiments.fitting.intervals import drawn_medians, ratio_intervals, resampled

OUTER_FOLDS = 8
_RESAMPLES = 200
_TREES = 20


@dataclass(frozen=True)
class Errors:
    """Errors of predictions against measurements, as fractions, not percent."""

    num_samples: int  #: that have both
    sample_mape: float  #: mean |predicted / measured - 1| over samples
    sample_median: float  #: median of the same
    setting_mape: float  #: mean over settings of |median predicted / median measured - 1| of the setting's samples
    bias: float  #: median of predicted / measured - 1
    #: 95 % interval of `setting_mape`, by drawing settings of the knobs (bootstrap); None for one setting
    setting_mape_ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class Repeatability:
    """By how much the samples of a setting differ from one another; fractions, not percent."""

    #: mean |median of the setting's other samples / sample - 1|; crops and prompts differ among them
    sample_mape: float
    #: mean over settings of the deviation of a resampled median from the setting's median (bootstrap)
    setting_mape: float


@dataclass(frozen=True)
class NoiseFloor:
    """The error of a model that knows each sample's mean time, from the runs of each sample; fractions, not percent."""

    num_samples: int  #: with two runs or more
    sample_mape: float  #: mean |run / mean of the sample's n runs - 1|, times sqrt(n / (n - 1)) for the n
    #: mean over settings of the deviation of the setting's median where each sample has another of its runs, likewise
    setting_mape: float


@dataclass(frozen=True, kw_only=True)
class ModelErrors:
    """Errors of the estimator and the baselines in the same folds; keys are names of PREDICTED that samples have."""

    num_folds: int
    estimator: Mapping[str, Errors]
    linear: Mapping[str, Errors]  #: of `fit_linear`
    logs: Mapping[str, Errors]  #: of `fit_logs`
    forest: Mapping[str, Errors]  #: of `fit_forest`
    #: of the estimator where each request's vision has run, see `stage_regression.after_vision`
    after_vision: Mapping[str, Errors]


@dataclass(frozen=True, kw_only=True)
class LeftOut(ModelErrors):
    """Errors where whole levels of a knob, pictures or runs are left out; all are empty with `reason`."""

    num_groups: int  #: levels, pictures or runs
    reason: str | None  #: why there are no errors


@dataclass(frozen=True)
class Coverage:
    """The coverage of the intervals of samples whose setting was left out."""

    share: float  #: fraction of the samples that are inside
    width: float  #: median of (high - low) / predicted


@dataclass(frozen=True, kw_only=True)
class Validation(ModelErrors):
    """The results of a validation, settings left out."""

    left_out: Prediction  #: predictions with intervals, each sample's with its setting left out
    repeatability: Mapping[str, Repeatability]  #: by how much the samples of a setting differ
    coverage: Mapping[str, Coverage]  #: of the intervals
    #: what no model can be better than; without times of which no sample has two runs
    noise: Mapping[str, NoiseFloor]
    others: Mapping[str, LeftOut]  #: by name of `TimedSamples.wholes`
    #: predicted `T_total` [S], setting left out, by what is known of the answer's length: `expected` (the mean of the
    #: task's other samples), `p90` (their 90th percentile) and `true`
    totals: Mapping[str, np.ndarray]


def validate(samples: TimedSamples, level: float) -> Validation:
    """The validation of these samples; raises ResultsError where the settings are too few to leave some out."""
    num_settings = len(np.unique(samples.knobs))
    if num_settings <= MIN_SETTINGS:
        raise ResultsError(
            f"{num_settings} settings are too few to leave one out and fit the others; profile {MIN_SETTINGS + 1} or "
            "more"
        )
    num_folds = min(OUTER_FOLDS, num_settings)
    left_out, totals = left_out_predictions(samples, level, num_folds)
    measured = measured_times(samples)
    present = [name for name in PREDICTED if np.isfinite(measured[name]).any()]
    runs = measured_times(replace(samples, times=samples.runs)) if samples.runs else {}
    noise = {name: noise_floor(runs[name], samples.settings) for name in present if name in runs}
    return Validation(
        **vars(_compared(samples, left_out.times, num_folds)),
        left_out=left_out,
        repeatability={name: repeatability(measured[name], samples.settings) for name in present},
        coverage={name: coverage(left_out, name, measured[name]) for name in present},
        noise={name: each for name, each in noise.items() if each is not None},
        others={
            name: errors_left_out(samples, groups, 2 if name == RUNS else 3) for name, groups in samples.wholes.items()
        },
        totals=totals,
    )


def _compared(
    samples: TimedSamples, estimated: Mapping[str, np.ndarray], num_folds: int, groups: np.ndarray | None = None
) -> ModelErrors:
    """The errors of what the estimator predicted [S] and of the baselines, the same settings or groups left out."""
    linear, logs, forest = (
        predicted_left_out(samples, fit, num_folds, groups) for fit in (fit_linear, fit_logs, fit_forest)
    )
    return ModelErrors(
        num_folds=num_folds,
        estimator=errors_of(estimated, samples),
        linear=errors_of(linear, samples),
        logs=errors_of(logs, samples),
        forest=errors_of(forest, samples),
        after_vision=errors_after_vision(estimated, samples),
    )


def errors_of(predicted: Mapping[str, np.ndarray], samples: TimedSamples) -> dict[str, Errors]:
    """The errors of each time that these samples have."""
    measured = measured_times(samples)
    present = [name for name in PREDICTED if np.isfinite(measured[name]).any()]
    return {name: errors(predicted[name], measured[name], samples.settings) for name in present}


def errors_after_vision(predicted: Mapping[str, np.ndarray], samples: TimedSamples) -> dict[str, Errors]:
    """The errors of what is left of each request once its vision has run; empty without pictures."""
    later, measured = after_vision(predicted, samples.times["T_vision_total"]), measured_times(samples)
    return {
        name: errors(column, measured[name], samples.settings)
        for name, column in later.items()
        if np.isfinite(column * measured[name]).any()
    }


def errors_left_out(samples: TimedSamples, groups: np.ndarray, least: int = 3) -> LeftOut:
    """The errors where whole groups [S] are left out, each alone where they are no more than the folds.

    Args:
        least: number of groups below which none is left out.
    """
    num_groups = len(np.unique(groups))
    num_folds = min(OUTER_FOLDS, num_groups)
    reason = f"{num_groups} of it, and at least {least} are needed" if num_groups < least else None
    for which in () if reason else left_out_masks(groups, num_folds):
        rest = samples.take(~which)
        if len(np.unique(rest.knobs)) < MIN_SETTINGS:
            reason = f"a fold leaves fewer than {MIN_SETTINGS} settings"
        elif any(np.isnan(rest.times[name]).all() > np.isnan(samples.times[name]).all() for name in STAGES):
            reason = "a fold leaves no sample of a stage"
    found = ModelErrors(num_folds=0, estimator={}, linear={}, logs={}, forest={}, after_vision={})
    if reason is None:
        estimated = predicted_left_out(samples, fit_lines, num_folds, groups)
        found = _compared(samples, estimated, num_folds, groups)
    return LeftOut(**vars(found), num_groups=num_groups, reason=reason)


def left_out_predictions(
    samples: TimedSamples, level: float, num_folds: int
) -> tuple[Prediction, dict[str, np.ndarray]]:
    """[S], of an estimator that was fitted without the sample's fold, and `Validation.totals`."""
    totals = {length: np.full(len(samples), np.nan) for length in ("expected", "p90")}
    columns: dict[str, dict[str, np.ndarray]] = {
        which: {name: np.full(len(samples), np.nan) for name in PREDICTED} for which in ("times", "low", "high")
    }
    unseen, extrapolated = np.zeros(len(samples), dtype=bool), np.zeros(len(samples), dtype=bool)
    for which in left_out_masks(samples.knobs, num_folds):
        estimator = LatencyEstimator(level).fit_part(samples.take(~which))
        requests = samples.requests.take(which)
        found = estimator.predict(requests)
        for length, column in totals.items():
            known = estimator.fitted.expected_output if length == "expected" else estimator.fitted.output_p90
            # A task of which no other setting was measured is taken for a typical one.
            lengths = [known.get(str(task), float(np.mean([*known.values()]))) for task in samples.tasks[which]]
            column[which] = estimator.predict(replace(requests, output_tokens=np.array(lengths))).times["T_total"]
        unseen[which], extrapolated[which] = found.unseen_knobs, found.extrapolated
        for name in PREDICTED:
            columns["times"][name][which] = found.times[name]
            columns["low"][name][which] = found.low[name]
            columns["high"][name][which] = found.high[name]
    found = Prediction(columns["times"], columns["low"], columns["high"], unseen, extrapolated)
    return found, totals | {"true": columns["times"]["T_total"]}


def fit_linear(samples: TimedSamples) -> Predict:
    """The line of each stage with the least mean error, each relative to what a first such line predicts.

    Its terms are the estimator's; its coefficients may be negative.
    Errors relative to what was measured would draw it below the median of noisy times.
    """
    # Its import takes a second, and most commands need none of it.
    from sklearn.linear_model import QuantileRegressor

    def fit(name: str, requests: RequestColumns, times: np.ndarray) -> PredictStage:
        kept = identifiable(STAGE_TERMS[name], requests)
        columns = columns_of(kept, requests)
        units = columns.max(axis=0)
        line = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
        first = line.fit(columns / units, times, sample_weight=1 / times).predict(columns / units)
        line.fit(columns / units, times, sample_weight=1 / np.maximum(first, times.min()))
        return lambda others: np.asarray(line.predict(columns_of(kept, others) / units))

    return _fit_stages_separately(samples, fit)


# What a stage's time is a product of powers of; a time of a request without a picture is not asked for.
_FACTORS: Mapping[str, Callable[[RequestColumns], tuple[np.ndarray, ...]]] = {
    "T_vision_total": lambda of: (of.crops + 1,),
    "T_LLM_prefill": lambda of: (of.prompt_tokens, of.top_k, of.num_active_blocks),
    "T_decode_per_token": lambda of: (of.context, of.top_k, of.num_active_blocks),
}


def fit_logs(samples: TimedSamples) -> Predict:
    """A model of each stage that adds in logs: a constant and a power of each knob and length, by least squares."""

    def fit(name: str, requests: RequestColumns, times: np.ndarray) -> PredictStage:
        logs = np.log(np.stack(_FACTORS[name](requests), axis=1))
        centre, level = logs.mean(axis=0), float(np.log(times).mean())
        # Of least norm: what had one value has the power 0.
        powers = np.linalg.lstsq(logs - centre, np.log(times) - level, rcond=1e-9)[0]
        return lambda others: np.exp(level + (np.log(np.stack(_FACTORS[name](others), axis=1)) - centre) @ powers)

    return _fit_stages_separately(samples, fit)


def fit_forest(samples: TimedSamples) -> Predict:
    """A random forest of each stage on tokens and knobs, fitted to logarithms, of which errors are relative."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import RandomForestRegressor

    def fit(_: str, requests: RequestColumns, times: np.ndarray) -> PredictStage:
        forest = RandomForestRegressor(_TREES, random_state=0)
        fitted = TransformedTargetRegressor(forest, func=np.log, inverse_func=np.exp)
        fitted.fit(_plain_features(requests), times)
        return lambda others: np.asarray(fitted.predict(_plain_features(others)))

    return _fit_stages_separately(samples, fit)


def _plain_features(requests: RequestColumns) -> np.ndarray:
    """Every column [S, 5] but crops, which the vision tokens follow from."""
    return np.stack([column for name, column in vars(requests).items() if name != "crops"], axis=1)


PredictStage = Callable[[RequestColumns], np.ndarray]


def _fit_stages_separately(
    samples: TimedSamples, fit: Callable[[str, RequestColumns, np.ndarray], PredictStage]
) -> Predict:
    """Predictions by a model of each stage; `fit` takes its name, requests of S samples and their times [S]."""
    found: dict[str, PredictStage] = {}
    for name in STAGES:
        has = np.isfinite(samples.times[name])
        if has.any():
            found[name] = fit(name, samples.requests.take(has), samples.times[name][has])

    def predict(requests: RequestColumns) -> Mapping[str, np.ndarray]:
        none = np.zeros(len(requests))
        vision_ms, prefill_ms, per_token_ms = (found[name](requests) if name in found else none for name in STAGES)
        vision_ms = np.where(requests.vision_tokens > 0, vision_ms, 0.0)
        return composed_times(vision_ms, prefill_ms, per_token_ms, requests.output_tokens)

    return predict


def errors(predicted: np.ndarray, measured: np.ndarray, settings: np.ndarray) -> Errors:
    """The errors over the samples that have both; there must be some."""
    has = np.isfinite(predicted) & np.isfinite(measured) & (measured > 0)
    predicted, measured, settings = predicted[has], measured[has], settings[has]
    relative = deviations(predicted, measured)
    of_settings = places_by_setting(settings)
    per_setting = np.array([abs(np.median(predicted[own]) / np.median(measured[own]) - 1) for own in of_settings])
    return Errors(
        num_samples=len(relative),
        sample_mape=float(np.abs(relative).mean()),
        sample_median=float(np.median(np.abs(relative))),
        setting_mape=float(np.mean(per_setting)),
        bias=float(np.median(relative)),
        setting_mape_ci95=_interval_over_knobs(per_setting, [str(settings[own[0]]) for own in of_settings]),
    )


def _interval_over_knobs(errors_of_settings: np.ndarray, settings: Sequence[str]) -> tuple[float, float] | None:
    """95 % interval of the mean error; a setting of the knobs is drawn in all tasks and runs at once."""
    knobs, places = np.unique([name.split(" ", 1)[-1] for name in settings], return_inverse=True)
    if len(knobs) < 2:
        return None
    sums, counts = np.bincount(places, errors_of_settings), np.bincount(places)
    return ratio_intervals(sums[None], counts[None])[0]


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
        drawn = drawn_medians(times, resampled(generator, len(times), _RESAMPLES))
        of_settings.append(float(np.abs(drawn / np.median(times) - 1).mean()))
    if not of_samples:
        raise ResultsError("no setting has two samples with times, so their noise is not known; profile more samples")
    return Repeatability(float(np.mean(of_samples)), float(np.mean(of_settings)))


def noise_floor(runs: np.ndarray, settings: np.ndarray) -> NoiseFloor | None:
    """The noise of measuring the same sample again; None where no sample has two runs.

    Args:
        runs: [R, S], times of each run; NaN where there is none.
    """
    number = np.isfinite(runs).sum(axis=0)
    again = number >= 2
    if not again.any():
        return None
    runs, number, settings = runs[:, again], number[again], settings[again]
    centre = np.nanmean(runs, axis=0)
    unbiased = np.sqrt(number / (number - 1))
    of_samples = np.nanmean(np.abs(runs / centre - 1), axis=0) * unbiased
    generator = np.random.default_rng(0)
    of_settings = []
    for own in places_by_setting(settings):
        times = runs[:, own].T
        one_of_each = generator.multinomial(1, np.isfinite(times) / number[own, None], size=(_RESAMPLES, len(own)))
        medians = drawn_medians(times.ravel(), one_of_each.reshape(_RESAMPLES, -1))
        of_settings.append(float(np.abs(medians / medians.mean() - 1).mean() * unbiased[own].mean()))
    return NoiseFloor(len(number), float(of_samples.mean()), float(np.mean(of_settings)))


def places_by_setting(settings: np.ndarray) -> list[np.ndarray]:
    """Indices of the samples of each setting, settings in alphabetical order."""
    numbers, counts = np.unique(settings, return_inverse=True, return_counts=True)[1:]
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])


def _medians_of_others(times: np.ndarray) -> np.ndarray:
    """[n], the median of all but each one."""
    order = np.argsort(times, kind="stable")
    ranks = np.empty(len(times), dtype=np.int64)
    ranks[order] = np.arange(len(times))
    # Of n - 1 in order; those after the one that is left out are one place further.
    middle = np.array([[(len(times) - 2) // 2], [(len(times) - 1) // 2]])
    return np.asarray(times[order][middle + (middle >= ranks)].mean(axis=0))


def coverage(predicted: Prediction, name: str, measured: np.ndarray) -> Coverage:
    """The coverage of one time, over the samples that have it."""
    has = np.isfinite(measured) & (measured > 0)
    low, high = predicted.low[name][has], predicted.high[name][has]
    inside = (low <= measured[has]) & (measured[has] <= high)
    return Coverage(float(inside.mean()), float(np.median((high - low) / predicted.times[name][has])))
