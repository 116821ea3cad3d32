"""Paired comparison of two settings on the same samples.

Two settings that answer the same questions are compared question by question: what makes a question hard for both
cancels out, so that far smaller differences show than between the two intervals of the means.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import bdtr

from experiment_core_utils.primitives.statistics import bounded_mean_interval


@dataclass(frozen=True)
class ScoredSample:
    """One sample's score at one setting; None where the metric has no value for it."""

    image_id: str
    value: float | None


@dataclass(frozen=True)
class PairedComparison:
    """A setting against a baseline, over the samples that both have a score for."""

    n: int  #: those samples
    num_excluded: int  #: samples that only one of them has a score for; not in any figure here
    mean_baseline: float | None
    mean: float | None
    difference: float | None  #: mean of (setting - baseline); None where n is 0
    #: 95 % interval of the difference over pictures, by `bounded_mean_interval`; for samples that are all equal at both
    #: it is exact
    interval: tuple[float, float] | None
    #: better, worse, equal: samples on which the setting scores higher, lower, the same
    better: int
    worse: int
    equal: int
    #: exact two-sided sign test of better against worse, which for scores of 0 or 1 is McNemar's exact test. It takes
    #: samples as independent; where they share pictures, the interval is the one to trust.
    p_value: float | None


def compare_paired(
    baseline: Mapping[int, ScoredSample], setting: Mapping[int, ScoredSample], best: float = 1.0
) -> PairedComparison:
    """`setting` against `baseline`, each a mapping of sample id -> score in [0, `best`]."""
    scored = [{key: each.value for key, each in side.items() if each.value is not None} for side in (baseline, setting)]
    shared = sorted(scored[0].keys() & scored[1].keys())
    excluded = len(baseline.keys() | setting.keys()) - len(shared)
    if not shared:
        return PairedComparison(0, excluded, None, None, None, None, 0, 0, 0, None)
    before, after = ([side[key] for key in shared] for side in scored)
    differences = [new - old for old, new in zip(before, after, strict=True)]
    better, worse = sum(difference > 0 for difference in differences), sum(each < 0 for each in differences)
    return PairedComparison(
        n=len(shared),
        num_excluded=excluded,
        mean_baseline=sum(before) / len(shared),
        mean=sum(after) / len(shared),
        difference=sum(differences) / len(shared),
        interval=bounded_mean_interval(differences, [baseline[key].image_id for key in shared], best, -best),
        better=better,
        worse=worse,
        equal=len(shared) - better - worse,
        # Both tails of a fair coin.
        p_value=min(1.0, 2 * float(bdtr(min(better, worse), better + worse, 0.5))),
    )
