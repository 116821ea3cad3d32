"""In: what ran, pooled over processes (scored samples, or generated texts); out: accuracy, spread of times, rates."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from experiment_core_utils.meters.stability import find_outliers
from experiment_core_utils.primitives.statistics import (
    Distribution,
    bounded_mean_interval,
    describe,
    fraction_of,
    mean_of,
    rate,
)
from experiment_core_utils.records.sample_result import QUANTITIES
from experiment_core_utils.records.setting_result import AccuracyPart, CountsPart, TypeScores
from experiment_core_utils.records.settings import MeasuredSample, SettingSummary
from experiment_core_utils.records.text import InferenceMetrics, InferenceResults
from experiment_core_utils.tasks.interface import Answer, Metric, Score, Scoring

# Above this fraction of unreadable, empty, one-token or cut answers a result has a caveat.
MOST_UNREADABLE = 0.05


# How a quantity is read of a run, where no attribute of it has the quantity's name.
_OF_RUN: Mapping[str, Callable[[MeasuredSample, int], float | None]] = {
    "e2e_s": lambda sample, place: sample.runs[place].total_s,
    "thinking_s": MeasuredSample.thinking_s_of,
}
# How it is read of a sample, where it is not among the sample's host times.
_OF_SAMPLE: Mapping[str, Callable[[MeasuredSample], float | None]] = {
    "preprocess_s": lambda sample: sample.shape.preprocess_s,
    "vision_tokens": lambda sample: sample.shape.vision_tokens,
    "vision_tokens_diff": lambda sample: sample.shape.vision_tokens_difference,
    "pooled_image_features": lambda sample: sample.shape.actual.pooled_features if sample.shape.actual else None,
    "image_marker_tokens": lambda sample: sample.shape.image_marker_tokens,
    "text_tokens": lambda sample: sample.shape.text_tokens,
    "prompt_tokens": lambda sample: sample.shape.known_prompt_tokens,
    "output_tokens": lambda sample: sample.output_tokens,
    "thinking_tokens": lambda sample: sample.thinking_tokens,
    "vision_flops": lambda sample: sample.flops.vision_flops if sample.flops else None,
    "prefill_flops": lambda sample: sample.flops.prefill_flops if sample.flops else None,
    "decode_flops_per_token": lambda sample: sample.flops.decode_flops_per_token if sample.flops else None,
    "energy_j": lambda sample: sample.energy_j,
}


def value_of_run(sample: MeasuredSample, place: int, name: str) -> float | None:
    """The quantity of this name of the run at `place`; None where it is absent."""
    read = _OF_RUN.get(name)
    found: float | None = getattr(sample.runs[place], name) if read is None else read(sample, place)
    return found


def value_of_sample(sample: MeasuredSample, name: str) -> float | None:
    """The quantity of this name of a sample, whatever its runs; None where it is absent."""
    read = _OF_SAMPLE.get(name)
    return sample.host_s.get(name) if read is None else read(sample)


def published_figures(sample: MeasuredSample) -> dict[str, float | None]:
    """The quantities of a sample, whatever its runs, by key; without those of some samples that it does not have."""
    quantities = [quantity for quantity in QUANTITIES.values() if quantity.of == "sample"]
    values = {quantity: quantity.published(value_of_sample(sample, quantity.name)) for quantity in quantities}
    return {quantity.key: value for quantity, value in values.items() if quantity.is_everywhere or value is not None}


def summarise(samples: Sequence[MeasuredSample], accuracy: AccuracyPart, num_failed: int) -> SettingSummary:
    """Accuracy and distributions over samples; a sample without a quantity does not enter that one.

    Args:
        num_failed: samples that could not be run.
    """
    outliers = find_outliers([[run.total_s for run in sample.runs] for sample in samples])
    num_discarded = sum(sample.num_discarded_runs for sample in samples)
    counts = CountsPart.of(
        num_samples=len(samples),
        num_failed_samples=num_failed,
        num_latency_samples=sum(bool(sample.runs) for sample in samples),
        share_truncated=mean_of([not sample.ended for sample in samples]),
        share_one_token=mean_of([_is_cut_short(sample) for sample in samples]),
        share_failed=fraction_of(num_failed, len(samples) + num_failed),
        share_outlier_runs=outliers.share,
        share_outlier_runs_reason=outliers.reason,
        num_discarded_runs=num_discarded,
        share_discarded_runs=fraction_of(num_discarded, num_discarded + sum(len(sample.runs) for sample in samples)),
        num_disturbed_samples=sum(bool(sample.disturbances) for sample in samples),
    )
    return SettingSummary(accuracy, counts, distributions(samples), typical_distributions(samples), outliers.by_sample)


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
            spreads[name] = spread
    return spreads


def accuracy_by_type(answers: Sequence[Answer], scores: Sequence[Score]) -> dict[str, TypeScores]:
    """Mean score of each type of question, types in alphabetical order."""
    by_type: dict[str, list[float | None]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_type[answer.question_type].append(score.value)
    return {
        kind: TypeScores(accuracy=mean_of(values), num_samples=len(values)) for kind, values in sorted(by_type.items())
    }


# Of every batch, and added up over all.
_SUMMED = ("input_tokens", "padded_input_tokens", "output_tokens", "computed_output_tokens")


def combine_inference_metrics(inference_results: InferenceResults) -> InferenceMetrics:
    """Counts, rates and spreads of a text run, over one process or, pooled before, over all.

    `tokens_per_second` counts output tokens. Rates are None where the time or the count under them is 0.

    Args:
        inference_results: the published keys are enough; what comes from `batches` and `queries` is None without.
    """
    inputs, outputs = inference_results["total_input_tokens"], inference_results["total_output_tokens"]
    prompts, time_s = inference_results["num_prompts_processed"], inference_results["total_inference_time_s"]
    batches: Sequence[Mapping[str, Any]] = inference_results.get("batches", [])
    has_batches = "batches" in inference_results
    sums = {name: sum(batch[name] for batch in batches) for name in _SUMMED}
    positions = sums["padded_input_tokens"]
    gaps = [batch["inter_token_s"] for batch in batches if batch["inter_token_s"]]
    thinking = [query.get("thinking_tokens") for query in inference_results.get("queries", [])]
    return InferenceMetrics(
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_tokens=inputs + outputs,
        num_prompts=prompts,
        total_time_s=time_s,
        tokens_per_second=rate(outputs, time_s),
        queries_per_second=rate(prompts, time_s),
        latency_per_query_s=rate(time_s, prompts),
        avg_input_tokens_per_prompt=rate(inputs, prompts),
        avg_output_tokens_per_prompt=rate(outputs, prompts),
        num_batches=len(batches) if has_batches else None,
        mean_batch_size=mean_of([len(batch["prompt_indices"]) for batch in batches]),
        padding_share=fraction_of(positions - sums["input_tokens"], positions),
        batch_efficiency=rate(sums["output_tokens"], sums["computed_output_tokens"]),
        share_truncated=mean_of([not query["ended"] for query in inference_results.get("queries", [])]),
        ttft_s=spread_of([batch["ttft_s"] for batch in batches if batch["ttft_s"] is not None]),
        time_per_output_token_s=spread_of([sum(each) / len(each) for each in gaps]),
        inter_token_s=spread_of(list(chain(*gaps))),
        simulated_delay_s=inference_results.get("simulated_delay_s"),
        num_halved_batches=sum(batch["halvings"] > 0 for batch in batches) if has_batches else None,
        most_halvings=max((batch["halvings"] for batch in batches), default=None),
        avg_thinking_tokens_per_prompt=mean_of([tokens for tokens in thinking if tokens is not None]),
    )


def spread_of(values: Sequence[float]) -> dict[str, Any] | None:
    """The keys of `Distribution`; None for no values."""
    spread = describe(values)
    return None if spread is None else asdict(spread)
