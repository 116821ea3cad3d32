"""In: a sample, its request and what the model answered to it; out: the record that is kept of it."""

from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.primitives.records import BatchedAnswer, MeasuredSample, PreparedRequest, StagedRun
from experiment_core_utils.tasks.interface import Sample


def record_of_runs(
    model: StagedModel,
    setting: KnobSetting,
    sample: Sample,
    request: PreparedRequest,
    runs: tuple[StagedRun, ...],
    transfer_s: float,
) -> MeasuredSample:
    """Of a sample that was run alone and measured."""
    return _record(model, setting, sample, request, runs[0].token_ids, runs, transfer_s, None)


def record_of_answer(
    model: StagedModel, setting: KnobSetting, sample: Sample, request: PreparedRequest, answer: BatchedAnswer
) -> MeasuredSample:
    """Of a sample that was answered in a batch: it has no times."""
    return _record(model, setting, sample, request, answer.token_ids, (), None, answer)


def _record(
    model: StagedModel,
    setting: KnobSetting,
    sample: Sample,
    request: PreparedRequest,
    token_ids: tuple[int, ...],
    runs: tuple[StagedRun, ...],
    transfer_s: float | None,
    answer: BatchedAnswer | None,
) -> MeasuredSample:
    return MeasuredSample(
        sample_id=sample.sample_id,
        shape=request.shape,
        runs=runs,
        outputs_identical=len({run.token_ids for run in runs}) == 1 if runs else None,
        transfer_s=transfer_s,
        prediction=model.decode_text(token_ids),
        flops=model.count_flops(setting, request.shape, len(token_ids)),
        question_type=sample.question_type,
        image_id=sample.image_id,
        references=sample.answers,
        options=sample.options,
        answer_index=sample.answer_index,
        metadata={**sample.metadata, "question": sample.question},
        answer=answer,
    )
