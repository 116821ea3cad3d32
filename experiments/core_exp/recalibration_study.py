"""In: sweeps; out: how well an estimator of one does on another after N of its samples, each sweep named."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.core_exp.estimator_validation import Repeatability, repeatability
from experiments.core_exp.latency_estimator import MIN_SAMPLES, MIN_SETTINGS, LatencyEstimator
from experiments.core_exp.latency_features import TimedSamples, timed_samples
from experiments.core_exp.recalibration import SIZES, RecalibrationError, errors_against_samples
from experiments.core_exp.request_times import measured_times
from experiments.core_exp.settings_left_out import folds_of
from experiments.core_exp.sweep_results import Sweep, samples_frame

# What the synthetic device does to each stage: times this factor, plus this many milliseconds.
SYNTHETIC = {"T_vision_total": (1.8, 0.0), "T_LLM_prefill": (1.4, 3.0), "T_decode_per_token": (1.2, 1.0)}
STUDIED = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token", "T_total")


TOO_FEW = "the run has too few settings or samples to be split in two"


@dataclass(frozen=True)
class RecalibrationStudy:
    """What recalibration does on one pair of sweeps.

    Attributes:
        kind: `device` (another one), `order` (later in the same run) or `synthetic` (times changed by arithmetic).
        source: what the estimator was fitted on, in words.
        target: what it was recalibrated to.
        errors: one for each method, number of samples and time; empty with `reason`.
        repeatability: of the target's samples.
        reason: why there are no errors.
    """

    kind: str
    source: str
    target: str
    errors: Sequence[RecalibrationError]
    repeatability: dict[str, Repeatability]
    reason: str | None = None


def study_of_target(estimator: LatencyEstimator, source: Sweep, target: Sweep) -> RecalibrationStudy:
    """The same model on another device; raises ConfigurationError where the models differ."""
    one, other = source.provenance, target.provenance
    if (one.model, one.random_weights) != (other.model, other.random_weights):
        raise ConfigurationError(
            f"the target's results are of {other.model}, the source's of {one.model}: times of different shapes do not "
            "compare; give a run of the same model"
        )
    samples = timed_samples(samples_frame(target))
    return _study("device", estimator, samples, _device_name(source), _device_name(target))


def study_by_order(sweep: Sweep, samples: TimedSamples, level: float) -> RecalibrationStudy:
    """No second device: the settings that were measured in the first half of the run against those of the second."""
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
    if len(np.unique(first.knobs)) < MIN_SETTINGS or len(first) < MIN_SAMPLES or len(second) < 2 * min(SIZES):
        return RecalibrationStudy("order", source, target, (), {}, TOO_FEW)
    return _study("order", LatencyEstimator(level).fit(first), second, source, target)


def study_of_synthetic(samples: TimedSamples, level: float) -> RecalibrationStudy:
    """No second device: half of the settings against the other half with every time changed as SYNTHETIC says.

    The noise is that of the samples; what a real device does beside a factor and a constant is not in it.
    """
    changes = ", ".join(f"{name} x {factor:g} + {added:g} ms" for name, (factor, added) in SYNTHETIC.items())
    source, target = "one half of the settings", f"the other half on a synthetic device ({changes})"
    is_first = folds_of(samples.knobs, 2) == 0
    first, second = samples.take(is_first), synthetic_device(samples.take(~is_first))
    if len(np.unique(first.knobs)) < MIN_SETTINGS or len(first) < MIN_SAMPLES or len(second) < 2 * min(SIZES):
        return RecalibrationStudy("synthetic", source, target, (), {}, TOO_FEW)
    return _study("synthetic", LatencyEstimator(level).fit(first), second, source, target)


def synthetic_device(samples: TimedSamples) -> TimedSamples:
    """The same samples with the stages' times changed, and totals that are their sums."""
    times = {name: samples.times[name] * factor + added for name, (factor, added) in SYNTHETIC.items()}
    decode = np.nan_to_num((samples.requests.output_tokens - 1) * times["T_decode_per_token"])
    times["T_total"] = np.nan_to_num(times["T_vision_total"]) + times["T_LLM_prefill"] + decode
    return replace(samples, times=times)


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
