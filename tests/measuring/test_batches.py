"""Samples answered in batches: sizes, memory that runs out, time that runs out, samples that fail."""

import time
from collections.abc import Sequence

import pytest

from experiment_core_utils.facts.run_caveats import batching_caveats
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target
from experiment_core_utils.measuring.batches import BatchAnswerer, Bench, untimed_line
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.interface import answers_in_batches
from experiment_core_utils.primitives.errors import OutOfMemory, SampleError
from experiment_core_utils.records.requests import BatchedAnswer
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.interface import Sample
from tests.hand_made_records import ReadOff, failed_sample
from tests.scripted.scripted_model import EOS, ScriptedModel

SETTING = Setting.of(vision=tier_target("low"), top_k=2, num_active_blocks=RunningBlocks.of((0, 1)))


class Numbers:
    """The question of sample n is n; sample 5 cannot be read; sample 6 takes 0.3 s."""

    name, split, metric, max_new_tokens = "numbers", "all", "read_off", 4
    source: dict[str, str] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Sample:
        if index == 5:
            raise SampleError("sample 5: no picture")
        if index == 6:
            time.sleep(0.3)
        return Sample(index, f"picture-{index}", str(index), ("stop",), None, "reading")

    def question_type(self, index: int) -> str:
        return "reading"

    def prompt(self, sample: Sample) -> str:
        return sample.question


class Lenient(ReadOff):
    """`ReadOff` that reads the empty text, which the answerer asks about before it runs a sample, as no score."""

    def score(self, answers):  # type: ignore[no-untyped-def]
        return super().score([answer if answer.prediction else type(answer)("none", ("stop",)) for answer in answers])


def outcomes(
    model: ScriptedModel, ids: Sequence[int], size: int, limit_s: float | None = None
) -> list[list[MeasuredSample | FailedSample]]:
    task = Numbers()
    requests = RequestSource(task, model, ids, 0, 0, limit_s, keep_pictures=False)
    answerer = BatchAnswerer(Bench(model, requests, 4, Lenient()), size, limit_s)
    return [batch for batch in answerer.outcomes(SETTING, ids) if batch]


def batches_of(model: ScriptedModel) -> list[int]:
    return [int(call.split()[-1]) for call in model.calls if call.startswith("answer_batch")]


def test_a_record_of_an_answer_has_no_times() -> None:
    model = ScriptedModel(script=(1, 2, EOS))
    first, second = outcomes(model, (1, 2, 3), 2)
    assert [[each.sample_id for each in batch] for batch in (first, second)] == [[1, 2], [3]]
    sample = first[0]
    assert isinstance(sample, MeasuredSample)
    assert (sample.runs, sample.host_s, sample.outputs_identical) == ((), {}, None)
    assert sample.answer == BatchedAnswer((1, 2, EOS), True, 2, 2)
    assert (sample.prediction, sample.output_tokens, sample.ended) == ("1 2", 3, True)
    assert sample.metadata == {"question": "1", "prompt": "1"}
    assert isinstance(second[0], MeasuredSample)
    assert second[0].answer == BatchedAnswer((1, 2, EOS), True, 1, 2)


def test_prompts_of_like_length_are_answered_together() -> None:
    """Prompts of 1 and 2 characters; 4 batches of 2 are put in order at a time, the ninth sample stays last."""
    done = outcomes(ScriptedModel(), (1, 10, 11, 2, 12, 3, 13, 4, 7), 2)
    assert [[each.sample_id for each in batch] for batch in done] == [[1, 2], [3, 4], [10, 11], [12, 13], [7]]


def test_an_answer_without_end_of_sequence_is_cut() -> None:
    ((sample,),) = outcomes(ScriptedModel(script=(1, 2, 3, 4, 5, EOS)), (1,), 8)
    assert isinstance(sample, MeasuredSample)
    assert (sample.ended, sample.output_tokens) == (False, 4)


def test_a_batch_too_large_for_the_memory_is_halved_and_the_limit_stays() -> None:
    """Memory for 2: 8 fail, 4 fail, then 2 and 2 and 2 and 2; the next batch is of 2 at once."""
    model = ScriptedModel(largest_batch=2)
    ids = (10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
    done = [sample for batch in outcomes(model, ids, 8) for sample in batch]
    assert batches_of(model) == [8, 4, 2, 2, 2, 2, 2, 1]
    assert [sample.sample_id for sample in done] == list(ids)
    assert {(each.answer.batch_size, each.answer.batch_limit) for each in done} == {(2, 2), (1, 2)}  # type: ignore


def test_a_single_request_without_memory_fails_the_setting() -> None:
    model = ScriptedModel(largest_batch=0)
    with pytest.raises(OutOfMemory, match=r"^CUDA out of memory$"):
        outcomes(model, (1, 2, 3), 3)
    assert batches_of(model) == [3, 1]


def test_a_sample_that_cannot_be_read_fails_alone() -> None:
    (failed,), done = outcomes(ScriptedModel(), (4, 5, 7), 8)
    assert failed == failed_sample(5, "sample 5: no picture")
    assert [each.sample_id for each in done] == [4, 7]


def test_a_slow_preparation_fails_alone_and_a_slow_batch_is_answered_one_by_one() -> None:
    (failed,), done = outcomes(ScriptedModel(), (4, 6, 7), 8, limit_s=0.1)
    assert (failed.sample_id, failed.error) == (6, "SampleTimedOut")  # type: ignore[union-attr]
    assert [each.sample_id for each in done] == [4, 7]
    slow = ScriptedModel(batch_s=0.3)
    (failures,) = outcomes(slow, (7, 8), 8, limit_s=0.1)
    assert [each.sample_id for each in failures] == [7, 8]
    assert all(isinstance(each, FailedSample) and each.error == "SampleTimedOut" for each in failures)
    assert batches_of(slow) == [2, 1, 1]


def test_lower_precision_is_a_caveat_where_there_are_batches() -> None:
    (found,) = batching_caveats(10, 4, "bfloat16")
    assert found.figures == {"num_batched": 6, "num_samples": 10, "dtype": "bfloat16"}
    assert found.sentence.startswith("6 of 10 samples are answered in batches: in bfloat16 some answers may differ")
    assert batching_caveats(10, 4, "float32") == batching_caveats(10, None, "float16") == []
    assert batching_caveats(10, 10, "bfloat16") == []


def test_what_engines_time_alone_they_answer_alone() -> None:
    """In batches of modules an answer would be of another execution than those that are timed."""
    model = ScriptedModel(script=(1, 2, EOS))
    requests = RequestSource(Numbers(), model, (3, 10, 4), 0, 0, None, keep_pictures=False)
    stages = {"vision": "modules", "prefill": "modules", "decode": "kernel graph"}
    answerer = BatchAnswerer(Bench(model, requests, 4, Lenient(), engines=stages), 8, None)
    done = [sample for batch in answerer.outcomes(SETTING, (3, 10, 4)) for sample in batch]
    assert [each.sample_id for each in done] == [3, 4, 10]
    assert {each.answer for each in done} == {BatchedAnswer((1, 2, EOS), True, 1, 1)}  # type: ignore[union-attr]
    assert not batches_of(model) and sum(call.startswith("generate") for call in model.calls) == 0


def test_only_modules_and_servers_answer_together() -> None:
    assert answers_in_batches({"prefill": "modules", "decode": "modules"}) and answers_in_batches(None)
    assert answers_in_batches({"prefill": "server", "decode": "server"})
    assert not answers_in_batches({"vision": "modules", "prefill": "modules", "decode": "cpu step"})


def test_what_answers_one_by_one_cost_is_said() -> None:
    """900 of 900 + 100 * 3 requests are three quarters."""
    engines = {"vision": "modules", "prefill": "cpu blocks", "decode": "cpu step"}
    line = untimed_line(900, 100, 3, engines)
    assert line is not None and "(modules, cpu blocks, cpu step): 900 of its 1200 requests, or about 75%" in line
    assert untimed_line(0, 52, 3, engines) is None
    assert untimed_line(900, 100, 3, dict.fromkeys(engines, "modules")) is None
