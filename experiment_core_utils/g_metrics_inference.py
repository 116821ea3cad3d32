"""In: samples of one setting, pooled over processes, and their scores; out: accuracy, spread of times and tokens."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from experiment_core_utils.primitives.distributions import Distribution, bounded_mean_interval, describe
from experiment_core_utils.primitives.records import (
    AccuracySummary,
    MeasuredSample,
    SettingSummary,
    StagedRun,
    TypeAccuracy,
)
from experiment_core_utils.primitives.stability import find_outliers
from experiment_core_utils.tasks.interface import Answer, Metric, Sample, Score, Scoring


def _of_run(quantity: Callable[[StagedRun], float | None]) -> Callable[[MeasuredSample], float | None]:
    """A time of a sample's published run; None for a sample that was answered without measuring."""
    return lambda sample: None if sample.run is None else quantity(sample.run)


QUANTITIES: Mapping[str, Callable[[MeasuredSample], float | None]] = {
    "vision_s": _of_run(lambda run: run.vision_s),
    "prefill_s": _of_run(lambda run: run.prefill_s),
    "decode_s": _of_run(lambda run: run.decode_s),
    "e2e_s": _of_run(lambda run: run.total_s),
    "tpot_s": _of_run(lambda run: run.tpot_s),
    "ttft_s": _of_run(lambda run: run.ttft_s),
    "preprocess_s": lambda sample: sample.shape.preprocess_s,
    "transfer_s": lambda sample: sample.transfer_s,
    "vision_tokens": lambda sample: sample.shape.vision_tokens,
    "vision_tokens_diff": lambda sample: vision_tokens_difference(sample),
    "pooled_image_features": lambda sample: sample.shape.actual.pooled_features if sample.shape.actual else None,
    "prompt_tokens": lambda sample: sample.shape.prompt_tokens,
    "output_tokens": lambda sample: sample.output_tokens,
    "vision_flops": lambda sample: sample.flops.vision_flops if sample.flops else None,
    "prefill_flops": lambda sample: sample.flops.prefill_flops if sample.flops else None,
    "decode_flops_per_token": lambda sample: sample.flops.decode_flops_per_token if sample.flops else None,
}


def vision_tokens_difference(sample: MeasuredSample) -> int | None:
    """Theoretical minus actual vision tokens of a sample; None without a picture."""
    if sample.shape.theoretical is None:
        return None
    return sample.shape.theoretical.pooled_features - sample.shape.vision_tokens


def answer_to(sample: Sample, prediction: str) -> Answer:
    """`prediction` beside what it is judged against."""
    return Answer(
        prediction, sample.answers, sample.options, sample.answer_index, sample.question_type, sample.image_id
    )


def answer_of(sample: MeasuredSample) -> Answer:
    """The answer of a sample that was measured."""
    return Answer(
        prediction=sample.prediction,
        references=sample.references,
        options=sample.options,
        answer_index=sample.answer_index,
        question_type=sample.question_type,
        image_id=sample.image_id,
    )


def summarise(samples: Sequence[MeasuredSample], accuracy: AccuracySummary, num_failed: int) -> SettingSummary:
    """Accuracy and distributions over samples; a sample without a quantity does not enter that one.

    Args:
        num_failed: samples that could not be run.
    """
    truncated = [not sample.ended for sample in samples]
    asked = len(samples) + num_failed
    return SettingSummary(
        accuracy=accuracy,
        distributions=distributions(samples),
        share_truncated=sum(truncated) / len(truncated) if truncated else None,
        share_failed=num_failed / asked if asked else None,
        outliers=find_outliers([[run.total_s for run in sample.runs] for sample in samples]),
    )


def summarise_accuracy(answers: Sequence[Answer], scoring: Scoring, metric: Metric) -> AccuracySummary:
    """What the scores of a whole run come to; an answer for which the metric has no value enters no mean."""
    scored = [
        (score.value, answer.image_id)
        for answer, score in zip(answers, scoring.scores, strict=True)
        if score.value is not None
    ]
    values = [value for value, _ in scored]
    spread = describe(values)
    unparsed = sum(not score.parsed for score in scoring.scores)
    return AccuracySummary(
        metric=metric.name,
        best=metric.best,
        accuracy=scoring.overall,
        std=spread.std if spread else None,
        interval=bounded_mean_interval(values, [image for _, image in scored], metric.best),
        by_type=accuracy_by_type(answers, scoring.scores),
        num_unparsed=unparsed,
        share_unparsed=unparsed / len(answers) if answers else None,
        details=scoring.details,
    )


def distributions(samples: Sequence[MeasuredSample]) -> dict[str, Distribution]:
    """The spread of every quantity that at least one sample has."""
    found = {}
    for name, quantity in QUANTITIES.items():
        values = [value for sample in samples if (value := quantity(sample)) is not None]
        spread = describe(values)
        if spread is not None:
            found[name] = spread
    return found


def accuracy_by_type(answers: Sequence[Answer], scores: Sequence[Score]) -> dict[str, TypeAccuracy]:
    """Mean score of each type of question, types in alphabetical order."""
    by_type: dict[str, list[float | None]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        by_type[answer.question_type].append(score.value)
    return {kind: _type_accuracy(values) for kind, values in sorted(by_type.items())}


def _type_accuracy(values: Sequence[float | None]) -> TypeAccuracy:
    known = [value for value in values if value is not None]
    return TypeAccuracy(sum(known) / len(known) if known else None, len(values))
