"""One request, or a batch of them, run stage by stage, and its times named."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiment_core_utils.models.interface import Batched, Runnable, devices_of
from experiment_core_utils.primitives.device import Marks, new_marks, synchronize
from experiment_core_utils.records.requests import BatchedRun, SpanName, StagedRun, TimedTokens


def run_staged(
    model: Runnable, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks | None = None
) -> StagedRun:
    """Greedy decoding of one request, with a mark between the stages.

    Marks: request handed over | features ready | first token | second token | … | last token. The choice of a token
    and its copy to the host belong to the interval that it ends. The knobs must be in force already. A model that
    encodes pictures somewhere inside its prefill has marks around that; its prefill is what lies before and behind.

    Args:
        inputs: tensors on the model's device.
        marks: the first of which stands for the hand-over; None for new ones.
    """
    return run_together(model, [inputs], max_new_tokens, marks)[0]


def run_batch(
    model: Runnable, batch: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks | None = None
) -> StagedRun:
    """The run of the first request of a batch, whose times are those of all of them; of one alone `run_staged`.

    Args:
        batch: inputs of each request on the model's device.
        marks: as of `run_staged`.
    """
    run, answers = run_together(model, batch, max_new_tokens, marks)
    if len(batch) == 1:
        return run
    return BatchedRun(**vars(run), batch_size=len(batch), batch_output_tokens=sum(map(len, answers)))


def run_together(
    model: Runnable, batch: Sequence[Mapping[str, Any]], max_new_tokens: int, marks: Marks | None = None
) -> tuple[StagedRun, tuple[tuple[int, ...], ...]]:
    """The run of the first request of a batch, and the token ids of every answer; args as `run_batch`."""
    devices = devices_of(model)
    synchronize(*devices)
    marks = new_marks(*devices) if marks is None else marks
    if len(batch) == 1:
        generated = model.generate_timed(batch[0], max_new_tokens, marks)
        answers: tuple[tuple[int, ...], ...] = (generated.token_ids,)
    else:
        assert isinstance(model, Batched)  # as those have made sure who put the batch together
        answered = model.generate_batch_timed(batch, max_new_tokens, marks)
        generated, answers = answered.first, answered.token_ids
    return staged_run(generated, marks.seconds(), model.ends.up_to_end(generated.token_ids)[1]), answers


def warm_up_batch(model: Runnable, batch: Sequence[Mapping[str, Any]], max_new_tokens: int) -> None:
    """Prepare what a batch needs, see `Batched.warm_up_batch`; of one request alone `Runnable.warm_up`."""
    if len(batch) == 1:
        model.warm_up(batch[0], max_new_tokens)
    elif isinstance(model, Batched):
        model.warm_up_batch(batch, max_new_tokens)


def staged_run(generated: TimedTokens, seconds: Sequence[float], ended: bool) -> StagedRun:
    """Name the intervals between the marks; their sum is the total by construction."""
    spans = list(zip(generated.spans, seconds, strict=True))

    def of(stage: SpanName) -> list[float]:
        return [span_s for name, span_s in spans if name == stage]

    def whole(stage: SpanName) -> float | None:
        return sum(of(stage)) if stage in generated.spans else None

    return StagedRun(
        token_ids=generated.token_ids,
        vision_s=whole("vision"),
        prefill_s=whole("prefill"),
        decode_s=whole("decode"),
        total_s=sum(seconds),
        inter_token_s=tuple(of("decode")) if generated.is_by_token else (),
        ended=ended,
        first_token_s=whole("first_token"),
        prompt_tokens=generated.prompt_tokens,
        hidden_tokens=generated.hidden_tokens,
        served=generated.served,
        scores=generated.scores,
    )
