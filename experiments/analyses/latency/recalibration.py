"""Recalibration of an estimator to another device by a few samples, and its error by their number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import MIN_SAMPLES, MIN_SETTINGS, LatencyEstimator
from experiments.analyses.latency.features import TimedSamples, timed_samples
from experiments.analyses.latency.stage_regression import fit_stages, measured_times, stage_times
from experiments.analyses.latency.validation import Repeatability, places_by_setting, repeatability
from experiments.analyses.sweeps import Sweep, samples_frame
from experiments.fitting.held_out import relative_error
from experiments.fitting.regression import robust_nonnegative

METHODS = ("none", "global_affine", "stage_affine", "refit")
SIZES = (10, 25, 50, 100)
DRAWS = 40
# As many pseudo-samples say that the constant is 0: few samples of like settings cannot tell factor and constant apart,
# and without it noise decides.
_PRIOR = 1.0


@dataclass(frozen=True)
class RecalibrationError:
    """Error of one method with N samples, over repeated draws of these; fractions, not percent."""

    method: str
    num_samples: int
    name: str  #: the time that is predicted, of PREDICTED
    low: float  #: lower quartile over draws of the mean relative error on the samples that were not drawn
    median: float  #: of the same
    high: float  #: upper quartile


def recalibrate(estimator: LatencyEstimator, samples: TimedSamples, method: str) -> LatencyEstimator:
    """The estimator for the device of these samples.

    - `none`: as it is.
    - `global_affine`: a request takes a times as long and b ms more: a for all stages, b before the first token.
    - `stage_affine`: an a and a b for each stage.
    - `refit`: all coefficients are found again from these samples alone.

    Neither a nor b is negative, so that what was monotone stays so. Intervals keep their ratios, which are of the
    device that the estimator was fitted on.
    """
    if method not in METHODS:
        raise ConfigurationError(f"no recalibration {method!r}; choose among {', '.join(METHODS)}")
    before = estimator.fitted.stages
    if method == "none":
        return estimator
    if method == "global_affine":
        factor, added_ms = _affine_fit(stage_times(before, samples.requests)["T_total"], samples.times["T_total"])
        added = {"T_LLM_prefill": added_ms}
        stages = {name: stage.affine(factor, added.get(name, 0.0)) for name, stage in before.items()}
    elif method == "stage_affine":
        # One that no sample has stays as it is.
        stages = dict(before)
        for name, stage in before.items():
            has = np.isfinite(samples.times[name])
            if has.any():
                times = samples.times[name][has]
                stages[name] = stage.affine(*_affine_fit(stage.times(samples.requests.take(has)), times))
    else:
        refitted = fit_stages(samples)
        stages = {name: refitted.get(name, stage) for name, stage in before.items()}
    return estimator.with_stages(stages, AnalysisCaveat.of("recalibrated", method=method, num_samples=len(samples)))


def _affine_fit(predicted: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Factor and constant, none negative, of least error relative to the times; the constant is drawn towards 0."""
    unit = float(np.median(times))
    columns = np.stack([predicted, np.full(len(times), unit)], axis=1) / times[:, None]
    prior = np.array([0.0, _PRIOR**0.5])
    factor, units = robust_nonnegative(np.vstack([columns, prior]), np.append(np.ones(len(times)), 0.0))
    return float(factor), float(units) * unit


def errors_against_samples(
    estimator: LatencyEstimator, target: TimedSamples, names: Sequence[str], draws: int = DRAWS, seed: int = 0
) -> list[RecalibrationError]:
    """The error of each method with each number of samples that leaves at least as many to be predicted."""
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


STUDIED = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token", "T_total")
TOO_FEW = "the run has too few settings or samples to be split in two"
NO_ORDER = "the results do not say when in the run each was measured"


@dataclass(frozen=True)
class RecalibrationStudy:
    """The effect of recalibration on one pair of sweeps."""

    kind: str  #: `device` (another folder, such as of another device) or `order` (later in the same run)
    source: str  #: what the estimator was fitted on, in words
    target: str  #: what it was recalibrated to
    errors: Sequence[RecalibrationError]  #: one for each method, number of samples and time; empty with `reason`
    repeatability: dict[str, Repeatability]  #: of the target's samples
    reason: str | None = None  #: why there are no errors


def refuse_other_model(source: Sweep, target: Sweep) -> None:
    """Raises ConfigurationError where the target's results are of another model."""
    one, other = source.provenance, target.provenance
    if (one.model, one.random_weights) != (other.model, other.random_weights):
        raise ConfigurationError(
            f"the target's results are of {other.model}, the source's of {one.model}: times of different shapes do not "
            "compare; give a run of the same model"
        )


def study_of_target(estimator: LatencyEstimator, source: Sweep, target: Sweep) -> RecalibrationStudy:
    """A study of the same model on another device."""
    samples = timed_samples(samples_frame(target))
    return _study("device", estimator, samples, _device_name(source), _device_name(target))


def study_by_order(sweep: Sweep, samples: TimedSamples, level: float) -> RecalibrationStudy:
    """A study without a second device: what was measured in the first half of the run against the second half.

    In rounds the halves are of the samples, which are measured one after the other at all settings; else of the
    settings.
    """
    orders = [setting.result.setting_order for setting in sweep.settings]
    if any(order is not None and order.how == "rounds" for order in orders):
        source, target = "the first half of the samples of a run in rounds", "the second half"
        # A run that may stop early takes its samples in a random order.
        early = any(each.result.precision is not None and each.result.precision.asked for each in sweep.settings)
        place = None if early else _place_in_setting(samples.settings)
    else:
        source, target = "settings measured in the first half of the run", "those of the second half"
        positions = {
            f"{each.task} {each.key}": order and order.position
            for each, order in zip(sweep.settings, orders, strict=True)
        }
        place = np.array([positions[str(each)] for each in samples.settings], dtype=np.float64)
    if place is None or np.isnan(place).any():
        return RecalibrationStudy("order", source, target, (), {}, NO_ORDER)
    is_first = place < np.median(np.unique(place))
    first, second = samples.take(is_first), samples.take(~is_first)
    if len(np.unique(first.knobs)) < MIN_SETTINGS or len(first) < MIN_SAMPLES or len(second) < 2 * min(SIZES):
        return RecalibrationStudy("order", source, target, (), {}, TOO_FEW)
    return _study("order", LatencyEstimator(level).fit(first), second, source, target)


def _place_in_setting(settings: np.ndarray) -> np.ndarray:
    """[S], how many samples of the same setting stand before each."""
    place = np.empty(len(settings))
    for own in places_by_setting(settings):
        place[own] = np.arange(len(own))
    return place


def _study(
    kind: str, estimator: LatencyEstimator, target: TimedSamples, source_name: str, target_name: str
) -> RecalibrationStudy:
    measured = measured_times(target)
    names = [name for name in STUDIED if name in estimator.fitted.ratios and np.isfinite(measured[name]).any()]
    return RecalibrationStudy(
        kind=kind,
        source=source_name,
        target=target_name,
        errors=errors_against_samples(estimator, target, names),
        repeatability={name: repeatability(measured[name], target.settings) for name in names},
    )


def _device_name(sweep: Sweep) -> str:
    device = sweep.provenance.device
    if sweep.provenance.is_gpu:
        return f"{device}, {sweep.provenance.execution or 'execution not known'}"
    threads = sweep.settings[0].result.provenance.hardware.torch_threads
    return f"{device}, {threads} thread{'' if threads == 1 else 's'}"
