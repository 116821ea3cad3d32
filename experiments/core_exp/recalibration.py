"""In: an estimator of one device and a few samples of another; out: an estimator of that, and its error against N."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.core_exp.latency_estimator import LatencyEstimator
from experiments.core_exp.latency_features import STAGES, TimedSamples
from experiments.core_exp.request_times import fit_stages, measured_times, stage_times, vision_times
from experiments.core_exp.settings_left_out import relative_error
from experiments.core_exp.stage_model import FORMS, StageModel, linear, robust_nonnegative

METHODS = ("none", "global_affine", "stage_affine", "refit")
SIZES = (10, 25, 50, 100)
DRAWS = 40
# As many pseudo-samples say that the constant is 0: few samples of like settings cannot tell a factor from a constant,
# and without it noise decides.
_PRIOR = 1.0


@dataclass(frozen=True)
class RecalibrationError:
    """Error of one method with N samples, over repeated draws of these; shares, not percent.

    Attributes:
        name: the time that is predicted, of PREDICTED.
        low: lower quartile over draws of the mean relative error on the samples that were not drawn.
        median: of the same.
        high: upper quartile.
    """

    method: str
    num_samples: int
    name: str
    low: float
    median: float
    high: float


def recalibrate(estimator: LatencyEstimator, samples: TimedSamples, method: str) -> LatencyEstimator:
    """The estimator for the device of these samples.

    - `none`: as it is.
    - `global_affine`: a request takes a times as long and b ms more: a for all stages, b before the first token.
    - `stage_affine`: an a and a b for each stage.
    - `refit`: the forms are kept, all coefficients are found again from these samples alone.

    Neither a nor b is negative, so that what was monotone stays so. Intervals keep their ratios, which are of the
    device that the estimator was fitted on.
    """
    if method not in METHODS:
        raise ConfigurationError(f"no recalibration {method!r}; choose among {', '.join(METHODS)}")
    before = estimator.fitted.stages
    if method == "none":
        return estimator
    if method == "global_affine":
        stages = _global_affine(before, samples)
    elif method == "stage_affine":
        stages = _stage_affine(before, samples)
    else:
        forms = {name: next(form for form in FORMS[name] if form.name == before[name].form) for name in before}
        stages = {**before, **fit_stages(samples, forms)}
    caveat = f"recalibrated by {method} with {len(samples)} samples; its intervals have the ratios of the device before"
    return estimator.with_stages(stages, caveat)


def _global_affine(stages: Mapping[str, StageModel], samples: TimedSamples) -> dict[str, StageModel]:
    total = samples.times["T_total"]
    factor, added_ms = _affine_fit(stage_times(stages, samples.requests)["T_total"], total, total)
    added = {"T_LLM_prefill": added_ms}
    return {name: stage.affine(factor, added.get(name, 0.0)) for name, stage in stages.items()}


def _stage_affine(stages: Mapping[str, StageModel], samples: TimedSamples) -> dict[str, StageModel]:
    """Samples on a floor that begins with the request are compared from its beginning; the branch is that of before."""
    found: dict[str, StageModel] = {}
    requests = samples.requests
    before_ms = vision_times(stages, requests)
    for name in (each for each in STAGES if each in stages):
        stage, times = stages[name], samples.times[name]
        has = np.isfinite(times)
        if not has.any():
            found[name] = stage
            continue
        base, target = linear(stage.work, requests), times
        if stage.floor:
            floor = linear(stage.floor, requests)
            on_floor = floor - (before_ms if stage.runs_ahead else 0.0) > base
            base = np.where(on_floor, floor, base)
            if stage.runs_ahead:
                target = times + np.where(on_floor, vision_times(found, requests), 0.0)
        found[name] = stage.affine(*_affine_fit(base[has], target[has], times[has]))
    return found


def _affine_fit(base: np.ndarray, target: np.ndarray, scale: np.ndarray) -> tuple[float, float]:
    """Factor and constant, none negative, of least error relative to `scale`; the constant drawn towards 0."""
    unit = float(np.median(scale))
    columns = np.stack([base, np.full(len(base), unit)], axis=1) / scale[:, None]
    prior = np.array([0.0, _PRIOR**0.5])
    factor, units = robust_nonnegative(np.vstack([columns, prior]), np.append(target / scale, 0.0))
    return float(factor), float(units) * unit


def errors_against_samples(
    estimator: LatencyEstimator, target: TimedSamples, names: Sequence[str], draws: int = DRAWS, seed: int = 0
) -> list[RecalibrationError]:
    """Each method with each number of samples that leaves at least as many to be predicted."""
    measured = measured_times(target)
    found = []
    for size in (size for size in SIZES if 2 * size <= len(target)):
        errors: dict[tuple[str, str], list[float]] = {}
        generator = np.random.default_rng(seed)
        for _ in range(draws):
            drawn = np.zeros(len(target), dtype=bool)
            drawn[generator.choice(len(target), size=size, replace=False)] = True
            rest = target.requests.take(~drawn)
            for method in METHODS:
                stages = recalibrate(estimator, target.take(drawn), method).fitted.stages
                times = stage_times(stages, rest)
                for name in names:
                    error = relative_error(times[name], measured[name][~drawn])
                    errors.setdefault((method, name), []).append(error)
        for (method, name), values in errors.items():
            low, median, high = (float(each) for each in np.percentile(values, (25, 50, 75)))
            found.append(RecalibrationError(method, size, name, low, median, high))
    return found
