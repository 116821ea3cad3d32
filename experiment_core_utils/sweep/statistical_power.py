"""Statistical power: the differences between two settings that a number of samples can show, and the reverse.

A difference is shown where the 95 % interval of paired samples leaves out 0; here with a probability of 80 %, for one
pair of settings that is named beforehand, each sample with a picture of its own. More settings need more samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import ndtri, stdtrit

from experiment_core_utils.primitives.statistics import CONFIDENCE
from experiment_core_utils.records.setting_result import SettingResult

POWER = 0.8
# Where no earlier results say: answers that change from a setting to another, and the spread of a sample's ratio of
# times around their mean ratio.
ASSUMED_CHANGED, ASSUMED_SPREAD = 0.1, 0.1
# Earlier settings that are looked at in pairs.
_MOST_SETTINGS = 12


@dataclass(frozen=True)
class PairSpread:
    """How two settings differ from sample to sample."""

    changed: float  #: fraction of samples whose score differs
    #: standard deviation of the difference in time, left when one's times are scaled to the other's mean, as a fraction
    #: of that mean
    latency: float
    num_pairs: int  #: pairs of earlier settings of which these are the medians; 0 where they are assumed


def pair_spread(earlier: Mapping[str, SettingResult]) -> PairSpread:
    """The medians over pairs of earlier settings; what they do not say is assumed."""
    changed, latency = [], []
    sides = [
        {sample.sample_id: (sample.accuracy, sample.T_total) for sample in result.per_sample_results}
        for result in list(earlier.values())[:_MOST_SETTINGS]
    ]
    for one, other in combinations(sides, 2):
        pairs = [(one[at], other[at]) for at in one.keys() & other.keys()]
        scores = [(a, b) for (a, _), (b, _) in pairs if a is not None and b is not None]
        times = np.array([(a, b) for (_, a), (_, b) in pairs if a is not None and b is not None])
        if scores:
            changed.append(sum(a != b for a, b in scores) / len(scores))
        if len(times) > 2:
            scaled = times / times.mean(axis=0)
            latency.append(float((scaled[:, 0] - scaled[:, 1]).std(ddof=1)))
    # Answers that never changed among few samples say little about many.
    return PairSpread(
        max(float(np.median(changed)), 0.01) if changed else ASSUMED_CHANGED,
        float(np.median(latency)) if latency else ASSUMED_SPREAD,
        min(len(changed), len(latency)),
    )


def samples_for_accuracy(difference: float, changed: float) -> int | None:
    """Samples that show a difference in accuracy; None where fewer answers change than that.

    R. Connor, "Sample size for testing differences in proportions for the paired-sample design", Biometrics 43 (1987).
    """
    if difference > changed:
        return None
    sure, power = (float(ndtri(each)) for each in (0.5 + CONFIDENCE / 2, POWER))
    spread = sure * math.sqrt(changed) + power * math.sqrt(changed - difference**2)
    return max(math.ceil((spread / difference) ** 2), math.ceil(6 / changed))


def accuracy_shown(num_samples: int, changed: float) -> float | None:
    """The smallest difference in accuracy, in steps of 0.001, that so many samples show; None for none."""
    for step in range(1, math.floor(1000 * changed) + 1):
        needed = samples_for_accuracy(step / 1000, changed)
        if needed is not None and needed <= num_samples:
            return step / 1000
    return None


def latency_shown(num_samples: int, spread: float) -> float | None:
    """The smallest relative difference in mean latency that so many samples show; None for fewer than 6."""
    if num_samples < 6:
        return None
    quantiles = sum(float(stdtrit(num_samples - 1, each)) for each in (0.5 + CONFIDENCE / 2, POWER))
    return quantiles * spread / math.sqrt(num_samples)


def samples_for_latency(difference: float, spread: float) -> int:
    """Samples that show a relative difference in mean latency."""
    normal = sum(float(ndtri(each)) for each in (0.5 + CONFIDENCE / 2, POWER))
    number = max(math.floor((normal * spread / difference) ** 2), 6)
    # Student's t is wider than the normal by a few samples.
    while (latency_shown(number, spread) or math.inf) > difference:
        number += 1
    return number


def power_sentences(
    num_samples: int, num_timed: int, spread: PairSpread, detect: float | None, best: float = 1.0
) -> list[str]:
    """What the plan's samples can show, and how many show `detect` (accuracy as a part of `best`, latency relative)."""
    accuracy, latency = accuracy_shown(num_samples, spread.changed), latency_shown(num_timed, spread.latency)
    of = "" if best == 1.0 else f" of {best:g}"
    basis = f"median of {spread.num_pairs} pairs of earlier settings" if spread.num_pairs else "assumed"
    lines = [
        "differences that two settings can show (95 % interval, 80 % power): accuracy "
        + ("none" if accuracy is None else f"{accuracy * best:.3g}")
        + f"{of} with {num_samples} samples, mean latency "
        + ("none" if latency is None else f"{latency:.1%}")
        + f" with {num_timed} timed ones ({basis}: {spread.changed:.0%} of answers change, times spread by "
        f"{spread.latency:.1%})"
    ]
    if detect is not None:
        answers = samples_for_accuracy(detect, spread.changed)
        shown = "no number of samples, fewer answers change" if answers is None else f"{answers} samples"
        lines.append(
            f"to show {detect:g}: accuracy {shown}; mean latency ({detect:.1%}) "
            f"{samples_for_latency(detect, spread.latency)} timed samples"
        )
    return lines
