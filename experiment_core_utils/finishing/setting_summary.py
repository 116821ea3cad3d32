"""Accuracy and distributions of a setting over its samples."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from experiment_core_utils.meters.stability import find_outliers
from experiment_core_utils.primitives.statistics import (
    Distribution,
    bounded_mean_interval,
    describe,
    fraction_of,
    half_of_interval,
    mean_of,
    positive_interval,
)
from experiment_core_utils.records.quantities.readings import value_of_run, value_of_sample
from experiment_core_utils.records.sample_result import QUANTITIES
from experiment_core_utils.records.setting_result import AccuracyPart, CountsPart, TypeScores
from experiment_core_utils.records.settings import MeasuredSample, SettingSummary
from experiment_core_utils.tasks.interface import Answer, Metric, Score, Scoring

# Quantities that all requests of a batch have together.
_OF_BATCHES = {quantity.name for quantity in QUANTITIES.values() if quantity.of == "run"} | {"energy_j"}


def summarise(samples: Sequence[MeasuredSample], accuracy: AccuracyPart, num_failed: int) -> SettingSummary:
    """Accuracy and distributions over samples; a sample without a quantity does not enter that one.

    Args:
        num_failed: samples that could not be run.
    """
    outliers = find_outliers([[run.total_s for run in sample.runs] for sample in samples])
    generated = [sample for sample in samples if not sample.scores]
    num_discarded = sum(sample.num_discarded_runs for sample in samples)
    counts = CountsPart.of(
        num_samples=len(samples),
        num_failed_samples=num_failed,
        num_latency_samples=sum(bool(sample.runs) for sample in samples),
        share_truncated=mean_of([not sample.ended for sample in generated]),
        share_one_token=mean_of([_is_cut_short(sample) for sample in generated]),
        share_failed=fraction_of(num_failed, len(samples) + num_failed),
        share_outlier_runs=outliers.share,
        share_outlier_runs_reason=outliers.reason,
        num_discarded_runs=num_discarded,
        share_discarded_runs=fraction_of(num_discarded, num_discarded + sum(len(sample.runs) for sample in samples)),
        num_disturbed_samples=sum(bool(sample.disturbances) for sample in samples),
    )
    return SettingSummary(accuracy, counts, distributions(samples), typical_distributions(samples), outliers.by_sample)


def of_batches(spread: Distribution, batch_size: int) -> Distribution:
    """The spread of what batches of so many requests share, whose interval is sqrt(batch_size) times as wide: each
    request is in as many batches (`replication.over_batches`)."""
    if batch_size == 1 or not spread.ci_low or spread.ci_high is None:
        return spread
    half = math.sqrt(batch_size) * half_of_interval(spread.mean, spread.ci_low, spread.ci_high)
    low, high = positive_interval(spread.mean, half)
    return replace(spread, ci_low=low, ci_high=high)


def _is_cut_short(sample: MeasuredSample) -> bool:
    """Whether the answer is one token, although most of its references have several words."""
    several_words = sum(len(reference.split()) > 1 for reference in sample.references)
    are_longer = 2 * several_words > len(sample.references)
    return sample.output_tokens - sample.ended == 1 and not sample.options and are_longer


def summarise_accuracy(answers: Sequence[Answer], scoring: Scoring, metric: Metric) -> AccuracyPart:
    """What the scores of a whole run come to; an answer for which the metric has no value enters no mean."""
    scored = [
        (score.value, answer.image_id)
        for answer, score in zip(answers, scoring.scores, strict=True)
        if score.value is not None
    ]
    values = [value for value, _ in scored]
    spread = describe(values)
    interval = bounded_mean_interval(values, [image for _, image in scored], metric.best)
    unparsed = sum(not score.parsed for score in scoring.scores)
    return AccuracyPart.of(
        metric=metric.name,
        metric_best=metric.best,
        metric_details=dict(scoring.details),
        accuracy=scoring.overall,
        accuracy_std=spread.std if spread else None,
        accuracy_ci95=None if interval is None else list(interval),
        accuracy_by_type=accuracy_by_type(answers, scoring.scores),
        num_unparsed=unparsed,
        share_unparsed=fraction_of(unparsed, len(answers)),
        share_empty=mean_of([not answer.prediction.strip() for answer in answers]),
    )


def distributions(samples: Sequence[MeasuredSample]) -> dict[str, Distribution]:
    """The spread of every quantity that at least one sample has; intervals of means are over pictures.

    Those of runs are over all measured runs; a sample's runs together count as one sample. A run without
    a stage that others have spent no time on it, so that the means of the stages add up to that of the total.
    """
    of_samples = {
        quantity.name: [
            [value]
            for value in quantity.with_absent_parts([value_of_sample(sample, quantity.name) for sample in samples])
        ]
        for quantity in QUANTITIES.values()
        if quantity.of == "sample" and quantity.figures is not None
    }
    found = _spreads(samples, _of_runs(samples, [range(len(each.runs)) for each in samples]) | of_samples)
    # Of a model that does not think it would say nothing.
    if "thinking_tokens" in found and found["thinking_tokens"].max == 0:
        del found["thinking_tokens"]
    return found


def typical_distributions(samples: Sequence[MeasuredSample]) -> dict[str, Distribution]:
    """The spread of quantities of runs over each sample's median run, so without its slow runs; of an even number of
    runs the mean of the two in the middle."""
    found = _of_runs(samples, [each.median_places for each in samples])
    return _spreads(samples, {name: [[mean_of(own)] for own in values] for name, values in found.items()})


def _of_runs(samples: Sequence[MeasuredSample], places: Sequence[Sequence[int]]) -> dict[str, list[list[float | None]]]:
    """The quantities of the runs at these places of each sample."""
    found = {}
    for quantity in QUANTITIES.values():
        if quantity.of == "run":
            own = [
                [value_of_run(sample, place, quantity.name) for place in at]
                for sample, at in zip(samples, places, strict=True)
            ]
            values = iter(quantity.with_absent_parts(list(chain(*own))))
            found[quantity.name] = [[next(values) for _ in each] for each in own]
    return found


def _spreads(
    samples: Sequence[MeasuredSample], values: Mapping[str, Sequence[Sequence[float | None]]]
) -> dict[str, Distribution]:
    """The spread of each quantity, from its values of each sample; all that a sample has together weigh 1."""
    spreads: dict[str, Distribution] = {}
    for name, of_samples in values.items():
        known = [
            (value, sample.image_id, 1 / len(own))
            for sample, found in zip(samples, of_samples, strict=True)
            if (own := [value for value in found if value is not None])
            for value in own
        ]
        spread = describe(*zip(*known, strict=True)) if known else None
        if spread is not None:
            size = max(sample.batch_size for sample in samples)
            spreads[name] = of_batches(spread, size) if name in _OF_BATCHES else spread
    return spreads


def accuracy_by_type(answers: Sequence[Answer], scores: Sequence[Score]) -> dict[str, TypeScores]:
    """Mean score of each type of question, types in alphabetical order."""
    by_type: dict[str, list[float | None]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_type[answer.question_type].append(score.value)
    return {
        kind: TypeScores(accuracy=mean_of(values), num_samples=len(values)) for kind, values in sorted(by_type.items())
    }
