"""What is kept of a sample: of runs their times, of a batched answer none, of both the text of the tokens."""

from dataclasses import replace

from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.visual_token_keep import KeptTokens
from experiment_core_utils.records.requests import BatchedAnswer, PreparedRequest, RequestShape, StageFlops
from experiment_core_utils.tasks.interface import Sample
from tests.hand_made_records import SETTING, staged_run
from tests.scripted.scripted_model import ScriptedModel

SHAPE = RequestShape(None, None, 0, 0, 10, 0.5)
REQUEST = PreparedRequest({}, SHAPE)
SAMPLE = Sample(
    sample_id=4,
    image=None,
    image_id="p",
    question="what?",
    answers=("stop", "halt"),
    question_type="reading",
    metadata={"question": "an older wording", "family": "signs"},
)


class CountingModel(ScriptedModel):
    """Its decode costs a FLOP more for each token of the answer."""

    def count_flops(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops:
        return StageFlops(None, shape.text_tokens, float(output_tokens))


def test_a_measured_sample_has_its_runs_and_whether_their_answers_agree() -> None:
    model = CountingModel()
    runs = (replace(staged_run(), token_ids=(1, 2, 9)), replace(staged_run(), token_ids=(1, 2, 9)))
    record = sample_record(model, SETTING, SAMPLE, REQUEST, runs, 0.25)
    assert (record.sample_id, record.shape, record.runs, record.host_s["transfer_s"]) == (4, SHAPE, runs, 0.25)
    assert (record.outputs_identical, record.answer) == (True, None)
    assert record.prediction == model.decode_text((1, 2, 9))
    assert record.flops == StageFlops(None, 10, 3.0)
    # Of answers that differ the first one is kept, and its length counts.
    other = (replace(runs[0], token_ids=(4, 3, 2, 9)), *runs, replace(runs[1], token_ids=(1, 9)))
    record = sample_record(model, SETTING, SAMPLE, REQUEST, other, 0.25)
    assert (record.outputs_identical, record.prediction) == (False, "4 3 2")
    assert record.flops == StageFlops(None, 10, 4.0)


def test_an_answered_sample_has_no_times() -> None:
    model, answer = CountingModel(), BatchedAnswer((5, 9), True, 2, 8)
    record = sample_record(model, SETTING, SAMPLE, REQUEST, answer=answer)
    assert (record.runs, record.outputs_identical, record.host_s, record.answer) == ((), None, {}, answer)
    assert record.prediction == model.decode_text((5, 9))
    assert record.flops == StageFlops(None, 10, 2.0)


def test_the_samples_question_is_kept_whatever_its_metadata_say() -> None:
    record = sample_record(ScriptedModel(), SETTING, SAMPLE, REQUEST, answer=BatchedAnswer((5,), True, 1, 1))
    assert record.metadata == {"question": "what?", "family": "signs"}
    assert (record.references, record.image_id, record.question_type) == (("stop", "halt"), "p", "reading")


def test_sizes_are_those_that_the_decoder_gets() -> None:
    request = PreparedRequest({}, replace(SHAPE, vision_tokens=9))
    setting = SETTING.replaced(visual_token_keep=KeptTokens(0.5))
    model, answer = CountingModel(), BatchedAnswer((5,), True, 1, 1)
    assert sample_record(model, setting, SAMPLE, request, answer=answer).shape.prompt_tokens == 10 + 5
    assert sample_record(model, SETTING, SAMPLE, request, answer=answer).shape is request.shape
