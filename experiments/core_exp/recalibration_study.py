"""In: sweeps; out: how well an estimator of one does on another after N of its samples, each sweep named."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.core_exp.estimator_validation import Repeatability, repeatability
from experiments.core_exp.latency_estimator import MIN_SAMPLES, MIN_SETTINGS, LatencyEstimator
from experiments.core_exp.latency_features import TimedSamples, timed_samples
from experiments.core_exp.recalibration import SIZES, RecalibrationError, errors_against_samples
from experiments.core_exp.request_times import measured_times
from experiments.core_exp.sweep_results import Sweep, samples_frame

STUDIED = ("T_vision_total", "T_LLM_prefill", "T_decode_per_token", "T_total")


@dataclass(frozen=True)
class RecalibrationStudy:
    """What recalibration does on one pair of sweeps.

    Attributes:
        source: what the estimator was fitted on, in words.
        target: what it was recalibrated to.
        errors: one for each method, number of samples and time; empty with `reason`.
        repeatability: of the target's samples.
        reason: why there are no errors.
    """

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
    return _study(estimator, samples, f"{one.device}, {_threads(source)}", f"{other.device}, {_threads(target)}")


def study_by_order(sweep: Sweep, samples: TimedSamples, level: float) -> RecalibrationStudy:
    """No second device: the settings that were measured in the first half of the run against those of the second."""
    source, target = "settings measured in the first half of the run", "those of the second half"
    positions = {
        f"{each.task} {each.key}": (each.result.get("setting_order") or {}).get("position") for each in sweep.settings
    }
    place = np.array([positions[str(each)] for each in samples.settings], dtype=np.float64)
    if np.isnan(place).any():
        return RecalibrationStudy(source, target, (), {}, "a setting does not say when in the run it was measured")
    is_first = place < np.median(np.unique(place))
    first, second = samples.take(is_first), samples.take(~is_first)
    if len(np.unique(first.settings)) < MIN_SETTINGS or len(first) < MIN_SAMPLES or len(second) < 2 * min(SIZES):
        return RecalibrationStudy(source, target, (), {}, "the run has too few settings to be split in two")
    return _study(LatencyEstimator(level).fit(first), second, source, target)


def _study(estimator: LatencyEstimator, target: TimedSamples, source_name: str, target_name: str) -> RecalibrationStudy:
    measured = measured_times(target)
    names = [name for name in STUDIED if name in estimator.fitted.ratios and np.isfinite(measured[name]).any()]
    return RecalibrationStudy(
        source=source_name,
        target=target_name,
        errors=errors_against_samples(estimator, target, names),
        repeatability={name: repeatability(measured[name], target.settings) for name in names},
    )


def _threads(sweep: Sweep) -> str:
    if sweep.provenance.is_gpu:
        return sweep.provenance.execution
    threads = sweep.settings[0].result["provenance"]["hardware"]["torch_threads"]
    return f"{threads} thread" if threads == 1 else f"{threads} threads"
