"""In: what ran, pooled over processes (scored samples, or generated texts); out: accuracy, spread of times, rates."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import Any

import numpy as np

from experiment_core_utils.meters.stability import find_outliers
from experiment_core_utils.primitives.statistics import (
    Distribution,
    bounded_mean_interval,
    describe,
    fraction_of,
    mean_of,
    rate,
)
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.requests import ServedNotes
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


# Above this fraction of answers of a single token a text run has measured prefills.
_MOST_ONE_TOKEN = 0.5
ANSWER_CAVEATS = frozenset({"answers_cut", "answers_ended_at_once"})


def cut_caveats(ended: Sequence[bool], limit: int) -> list[Caveat]:
    """The caveat of more than 5 % of answers that the limit of tokens cut; none otherwise.

    Args:
        ended: whether each answer came to its end.
    """
    cut = ended.count(False)
    if not ended or cut / len(ended) <= MOST_UNREADABLE:
        return []
    return [caveat("answers_cut", num_cut=cut, num_answers=len(ended), limit=limit)]


# A step: as many runs on either side at least, by such a factor, of which such a part of all pairs is in its order.
_STEP_RUNS, _STEP_FACTOR, _STEP_ORDERED = 5, 1.5, 0.95


def speed_step(seconds: Sequence[float]) -> tuple[float, float, int] | None:
    """The step in times, in order, that divides them best: the median before and after it, and how many are before.

    It is where the means of the logarithms differ most by their own error (least squares with one break); None where
    less than 19 of 20 pairs of a time before and one after are in its order, or it is below a factor of 1.5.
    """
    logs = np.log(np.maximum(seconds, 1e-9))
    number = len(logs)
    before = np.arange(_STEP_RUNS, number - _STEP_RUNS + 1)
    if not len(before):
        return None
    sums = np.cumsum(logs)
    gaps = (sums[-1] - sums[before - 1]) / (number - before) - sums[before - 1] / before
    place = int(before[np.argmax(np.abs(gaps) * np.sqrt(before * (number - before)))])
    one, other = np.sort(seconds[:place]), np.sort(seconds[place:])
    rising = float(np.searchsorted(one, other).mean()) / place
    medians = float(np.median(one)), float(np.median(other))
    is_step = max(rising, 1 - rising) >= _STEP_ORDERED and max(medians) >= _STEP_FACTOR * min(medians)
    return (*medians, place) if is_step else None


# Of the time to the first token of a request's first run: below it, a later one did not compute its whole prefill.
_WARM_RATIO = 0.8


def served_caveats(samples: Sequence[MeasuredSample], *, have_waited: bool = False) -> list[Caveat]:
    """The caveats of measured runs at a server that sent several tokens at once, did not count or did not send some,
    changed its speed, or answered repeated requests from its prefix cache.

    Args:
        samples: in the order in which they were measured.
        have_waited: whether requests waited for each other, so that their times do not show a cache.
    """
    runs = [run for sample in samples for run in sample.runs if run.first_token_s is not None]
    notes = [
        ServedNotes(is_counted=run.prompt_tokens is not None) if run.served is None else run.served for run in runs
    ]
    found = {
        "server_pieces": sum(
            len(run.token_ids) > 1 and not run.inter_token_s and not note.is_recut
            for run, note in zip(runs, notes, strict=True)
        ),
        "server_recut": sum(note.is_recut for note in notes),
        "server_uncounted": sum(not note.is_counted for note in notes),
        "server_miscounted": sum(not note.are_counts_possible for note in notes),
    }
    caveats = [caveat(kind, num_runs=count, num_all=len(runs)) for kind, count in found.items() if count]
    others = Counter(note.answered_by for note in notes if note.answered_by is not None)
    if others:
        names, number = sorted(others), sum(others.values())
        caveats.append(caveat("server_other_model", names=names, num_runs=number, num_all=len(runs)))
    hidden = [run.hidden_tokens for run in runs if run.hidden_tokens]
    if hidden:
        caveats.append(caveat("server_hidden_tokens", num_tokens=sum(hidden), num_runs=len(hidden), num_all=len(runs)))
    if not have_waited and (step := speed_step([run.first_token_s or 0.0 for run in runs])) is not None:
        before_s, after_s, place = step
        figures = {"before_ms": 1e3 * before_s, "after_ms": 1e3 * after_s, "num_before": place, "num_all": len(runs)}
        caveats.append(caveat("server_step", **figures))
    repeated = [(sample.runs[0].first_token_s, sample.runs[-1].first_token_s) for sample in samples if sample.runs[1:]]
    ratios = [last_s / first_s for first_s, last_s in repeated if first_s and last_s is not None]
    if not have_waited and ratios and (ratio := median(ratios)) < _WARM_RATIO:
        caveats.append(caveat("server_warm", ratio=ratio))
    return caveats


def text_answer_caveats(results: InferenceResults, limit: int) -> list[Caveat]:
    """The caveats of the answers of a text run: cut at the limit, or most of them ended at once."""
    queries = results["queries"]
    at_once = sum(query["ended"] and query["output_tokens"] == 1 for query in queries)
    is_fixed = results["decoding"].get("ignore_eos")
    found = [] if is_fixed else cut_caveats([query["ended"] for query in queries], limit)
    if queries and at_once / len(queries) > _MOST_ONE_TOKEN:
        found.append(caveat("answers_ended_at_once", num_answers=at_once, num_prompts=len(queries)))
    return found


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


def answer_caveats(accuracy: AccuracyPart, num_answers: int, share_one_token: float | None) -> list[Caveat]:
    """Caveats of answers that could not be read, are empty or end after one token, where those are more than a few,
    and of those that have no score or too few references.

    An empty answer cannot be read either, nor can one whose scoring failed; each is named once.
    """
    details = accuracy.metric_details or {}
    few, unscored, failed = (
        fraction_of(details.get(name, 0), num_answers) or 0.0
        for name in ("few_references", "unscored", "scoring_failed")
    )
    empty = accuracy.share_empty or 0.0
    fractions = {
        "answers_unparsed": max((accuracy.share_unparsed or 0.0) - empty - failed, 0.0),
        "answers_empty": empty,
        "answers_one_token": share_one_token or 0.0,
    }
    found = {kind: fraction for kind, fraction in fractions.items() if fraction > MOST_UNREADABLE}
    found |= {kind: each for kind, each in (("answers_unscored", unscored), ("few_references", few)) if each}
    return [caveat(kind, fraction=fraction, metric=accuracy.metric) for kind, fraction in found.items()]


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
