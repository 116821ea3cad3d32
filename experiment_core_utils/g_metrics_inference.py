"""In: measured samples of one setting, pooled over processes; out: accuracy, spread of the stage times and tokens."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from experiment_core_utils.primitives.distributions import Distribution, bounded_mean_interval, describe
from experiment_core_utils.primitives.records import MeasuredSample, SettingSummary, TypeAccuracy

QUANTITIES: Mapping[str, Callable[[MeasuredSample], float | None]] = {
    "vision_s": lambda sample: sample.run.vision_s,
    "prefill_s": lambda sample: sample.run.prefill_s,
    "decode_s": lambda sample: sample.run.decode_s,
    "e2e_s": lambda sample: sample.run.total_s,
    "tpot_s": lambda sample: sample.run.tpot_s,
    "ttft_s": lambda sample: sample.run.ttft_s,
    "preprocess_s": lambda sample: sample.shape.preprocess_s,
    "transfer_s": lambda sample: sample.transfer_s,
    "vision_tokens": lambda sample: sample.shape.vision_tokens,
    "vision_tokens_diff": lambda sample: vision_tokens_difference(sample),
    "pooled_image_features": lambda sample: sample.shape.actual.pooled_features if sample.shape.actual else None,
    "prompt_tokens": lambda sample: sample.shape.prompt_tokens,
    "output_tokens": lambda sample: len(sample.run.token_ids),
    "vision_flops": lambda sample: sample.flops.vision_flops if sample.flops else None,
    "prefill_flops": lambda sample: sample.flops.prefill_flops if sample.flops else None,
    "decode_flops_per_token": lambda sample: sample.flops.decode_flops_per_token if sample.flops else None,
}


def vision_tokens_difference(sample: MeasuredSample) -> int | None:
    """Theoretical minus actual vision tokens of a sample; None without a picture."""
    if sample.shape.theoretical is None:
        return None
    return sample.shape.theoretical.pooled_features - sample.shape.vision_tokens


def summarise(samples: Sequence[MeasuredSample]) -> SettingSummary:
    """Accuracy and distributions over samples; a sample without a quantity does not enter that one."""
    scores = [sample.accuracy for sample in samples]
    accuracy = describe(scores)
    truncated = [not sample.runs[0].ended for sample in samples]
    return SettingSummary(
        accuracy=accuracy.mean if accuracy else None,
        accuracy_std=accuracy.std if accuracy else None,
        accuracy_interval=bounded_mean_interval(scores),
        accuracy_by_type=accuracy_by_type(samples),
        distributions=distributions(samples),
        share_truncated=sum(truncated) / len(truncated) if truncated else None,
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


def accuracy_by_type(samples: Sequence[MeasuredSample]) -> dict[str, TypeAccuracy]:
    """Mean score of each type of question, types in alphabetical order."""
    scores: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        scores[sample.question_type].append(sample.accuracy)
    return {kind: TypeAccuracy(sum(values) / len(values), len(values)) for kind, values in sorted(scores.items())}
