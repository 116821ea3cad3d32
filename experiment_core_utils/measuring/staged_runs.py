"""One request run stage by stage, its times named, and the record of its sample."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.interface import Runnable, devices_of
from experiment_core_utils.primitives.device import Marks, new_marks, synchronize
from experiment_core_utils.records.requests import BatchedAnswer, PreparedRequest, SpanName, StagedRun, TimedTokens
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.content import digest_of
from experiment_core_utils.tasks.interface import Sample


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
    devices = devices_of(model)
    synchronize(*devices)
    marks = new_marks(*devices) if marks is None else marks
    generated = model.generate_timed(inputs, max_new_tokens, marks)
    return staged_run(generated, marks.seconds(), model.ends.up_to_end(generated.token_ids)[1])


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
    )


def _output_of(model: Runnable, run: StagedRun) -> tuple[object, ...]:
    """What is the same in runs of one output: its ids, or where a server sends none its text, length and end."""
    if run.first_token_s is None:
        return run.token_ids
    return model.decode_text(run.token_ids), len(run.token_ids), run.ended


def sample_record(
    model: Runnable,
    setting: Setting,
    sample: Sample,
    request: PreparedRequest,
    runs: tuple[StagedRun, ...] = (),
    transfer_s: float | None = None,
    answer: BatchedAnswer | None = None,
    scored_ids: tuple[int, ...] | None = None,
) -> MeasuredSample:
    """The record of a sample that was run alone and measured, or that was answered in a batch and has no times.

    Args:
        scored_ids: of the answer that is scored where it is none of the runs'.
    """
    first = runs[0] if runs else answer
    assert first is not None
    read_ids = first.token_ids if scored_ids is None else scored_ids
    shape = setting.shape(request.shape)
    if runs and runs[0].prompt_tokens is not None:
        shape = shape.counted_by_server(runs[0].prompt_tokens)
    prediction, scored = model.decode_text(read_ids), model.ends.answer(read_ids)
    return MeasuredSample(
        sample_id=sample.sample_id,
        shape=shape,
        runs=runs,
        outputs_identical=len({_output_of(model, run) for run in runs}) == 1 if runs else None,
        host_s={} if transfer_s is None else {"transfer_s": transfer_s},
        prediction=prediction,
        flops=model.count_flops(setting, shape, len(first.token_ids)),
        question_type=sample.question_type,
        image_id=sample.image_id,
        references=sample.answers,
        options=sample.options,
        answer_index=sample.answer_index,
        metadata={**sample.metadata, "question": sample.question},
        answer=answer,
        data_sha256=digest_of(sample),
        picture_sha256=sample.picture_sha256,
        scored_answer=None if scored == prediction else scored,
        thinking_tokens=model.ends.thinking_tokens(read_ids),
    )
