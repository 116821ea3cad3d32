"""Recalibration of an estimator to another device by a few samples, and its error by their number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.analyses.caveats import AnalysisCaveat
from experiments.analyses.latency.estimator import MIN_SAMPLES, MIN_SETTINGS, LatencyEstimator
from experiments.analyses.latency.features import STAGES, TimedSamples, timed_samples
from experiments.analyses.latency.stage_regression import (
    FORMS,
    StageModel,
    composed_times,
    fit_stages,
    linear,
    measured_times,
    stage_times,
    vision_times,
)
from experiments.analyses.latency.validation import Repeatability, repeatability
from experiments.analyses.sweeps import Sweep, samples_frame
from experiments.fitting.held_out import left_out_masks, relative_error
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
    return estimator.with_stages(stages, AnalysisCaveat.of("recalibrated", method=method, num_samples=len(samples)))


def _global_affine(stages: Mapping[str, StageModel], samples: TimedSamples) -> dict[str, StageModel]:
    total = samples.times["T_total"]
    factor, added_ms = _affine_fit(stage_times(stages, samples.requests)["T_total"], total, total)
    added = {"T_LLM_prefill": added_ms}
    return {name: stage.affine(factor, added.get(name, 0.0)) for name, stage in stages.items()}


def _stage_affine(stages: Mapping[str, StageModel], samples: TimedSamples) -> dict[str, StageModel]:
    """The recalibrated stages; samples on a floor that begins with the request are compared from its beginning."""
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
    """Factor and constant, none negative, of least error relative to `scale`; the constant is drawn towards 0."""
    unit = float(np.median(scale))
    columns = np.stack([base, np.full(len(base), unit)], axis=1) / scale[:, None]
    prior = np.array([0.0, _PRIOR**0.5])
    factor, units = robust_nonnegative(np.vstack([columns, prior]), np.append(target / scale, 0.0))
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


# What the synthetic device does to each stage: times this factor, plus this many milliseconds.
SYNTHETIC = {"T_vision_total": (1.8, 0.0), "T_LLM_prefill": (1.4, 3.0), "T_decode_per_token": (1.2, 1.0)}
STUDIED = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token", "T_total")
TOO_FEW = "the run has too few settings or samples to be split in two"


@dataclass(frozen=True)
class RecalibrationStudy:
    """The effect of recalibration on one pair of sweeps."""

    kind: str  #: `device` (another one), `order` (later in the same run) or `synthetic` (times changed by arithmetic)
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
    """A study without a second device: settings of the first half of the run against those of the second half."""
    source, target = "settings measured in the first half of the run", "those of the second half"
    positions = {
        f"{each.task} {each.key}": each.result.setting_order and each.result.setting_order.position
        for each in sweep.settings
    }
    place = np.array([positions[str(each)] for each in samples.settings], dtype=np.float64)
    if np.isnan(place).any():
        return RecalibrationStudy(
            "order", source, target, (), {}, "a setting does not say when in the run it was measured"
        )
    is_first = place < np.median(np.unique(place))
    first, second = samples.take(is_first), samples.take(~is_first)
    return _study_of_halves("order", first, second, level, source, target)


def study_of_synthetic(samples: TimedSamples, level: float) -> RecalibrationStudy:
    """A study without a second device: half of the settings against the other half with times changed by SYNTHETIC.

    The noise is that of the samples; what a real device does beside a factor and a constant is not in it.
    """
    changes = ", ".join(f"{name} x {factor:g} + {added:g} ms" for name, (factor, added) in SYNTHETIC.items())
    source, target = "one half of the settings", f"the other half on a synthetic device ({changes})"
    is_first = next(left_out_masks(samples.knobs, 2))
    first, second = samples.take(is_first), synthetic_device(samples.take(~is_first))
    return _study_of_halves("synthetic", first, second, level, source, target)


def synthetic_device(samples: TimedSamples) -> TimedSamples:
    """The same samples with the stages' times changed, and totals that are their sums."""
    times = {name: samples.times[name] * factor + added for name, (factor, added) in SYNTHETIC.items()}
    vision_ms, per_token_ms = (np.nan_to_num(times[name]) for name in ("T_vision_total", "T_decode_per_token"))
    totals = composed_times(vision_ms, times["T_LLM_prefill"], per_token_ms, samples.requests.output_tokens)
    return replace(samples, times=times | {"T_total": totals["T_total"]})


def _study_of_halves(
    kind: str, first: TimedSamples, second: TimedSamples, level: float, source: str, target: str
) -> RecalibrationStudy:
    if len(np.unique(first.knobs)) < MIN_SETTINGS or len(first) < MIN_SAMPLES or len(second) < 2 * min(SIZES):
        return RecalibrationStudy(kind, source, target, (), {}, TOO_FEW)
    return _study(kind, LatencyEstimator(level).fit(first), second, source, target)


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
        return f"{device}, {sweep.provenance.execution}"
    threads = sweep.settings[0].result.provenance.hardware.torch_threads
    return f"{device}, {threads} thread{'' if threads == 1 else 's'}"
