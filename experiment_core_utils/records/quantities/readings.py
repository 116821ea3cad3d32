"""How a quantity is read of a measured sample, or of one of its runs."""

from collections.abc import Callable, Mapping

from experiment_core_utils.records.sample_result import QUANTITIES
from experiment_core_utils.records.settings import MeasuredSample

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
    "text_tokens": lambda sample: _with_scored_text(sample, sample.shape.text_tokens),
    "prompt_tokens": lambda sample: _with_scored_text(sample, sample.shape.known_prompt_tokens),
    "output_tokens": lambda sample: sample.output_tokens,
    "thinking_tokens": lambda sample: sample.thinking_tokens,
    "thinking_forced": lambda sample: sample.thinking_forced,
    "vision_flops": lambda sample: sample.flops.vision_flops if sample.flops else None,
    "prefill_flops": lambda sample: sample.flops.prefill_flops if sample.flops else None,
    "decode_flops_per_token": lambda sample: sample.flops.decode_flops_per_token if sample.flops else None,
    "energy_j": lambda sample: sample.energy_j,
}


def _with_scored_text(sample: MeasuredSample, tokens: int | None) -> int | None:
    """Tokens of a prompt; of a text that is scored those of the text, too, whose prompt is the token before it."""
    own = 0 if sample.options else sum(score.num_tokens for score in sample.scores)
    return None if tokens is None else tokens + own


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
