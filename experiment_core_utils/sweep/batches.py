"""Answers of samples whose latency is not measured, computed in batches or in groups of settings."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from experiment_core_utils.e_inference import sample_record
from experiment_core_utils.models.common.finite_logits import failure_named
from experiment_core_utils.models.interface import StagedModel
from experiment_core_utils.primitives.device import out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    GenerationFailed,
    OutOfMemory,
    SampleError,
    SampleTimedOut,
)
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.knobs import CropRange, KnobSetting
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.records.requests import BatchedAnswer, PreparedRequest
from experiment_core_utils.records.sample_result import FailedSample
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.sweep.requests import RequestSource
from experiment_core_utils.tasks.interface import Metric, Sample, answer_to

Prepared = tuple[Sample, PreparedRequest]
# Batches whose samples are put in order of length together; more would pad less and take more memory of the host.
_BATCHES_PREPARED = 4


def batching_caveats(num_samples: int, num_latency_samples: int | None, dtype: str) -> list[Caveat]:
    """What a reader must know where samples are answered in batches in another precision than float32."""
    if num_latency_samples is None or num_latency_samples >= num_samples or dtype == "float32":
        return []
    answered = num_samples - num_latency_samples
    return [caveat("batched_answers", num_batched=answered, num_samples=num_samples, dtype=dtype)]


@dataclass(frozen=True)
class Bench:
    """What is measured: a loaded model, the requests that it answers, and the metric that scores the answers."""

    model: StagedModel
    requests: RequestSource  #: gives this process's samples prepared; started and ended by the caller
    max_new_tokens: int
    metric: Metric
    latency_ids: Set[int] = frozenset()  #: the samples to measure; the others are answered in batches
    engines: Mapping[str, str] | None = None  #: what runs each stage of the model, by name; None where it is not noted


class BatchAnswerer:
    """Answers samples in batches, smaller ones where memory runs out.

    Args:
        batch_size: most requests in a batch.
        sample_timeout_s: limit for the preparation of each sample, and for a batch times the samples in it.
    """

    def __init__(self, bench: Bench, batch_size: int, sample_timeout_s: float | None) -> None:
        self._bench = bench
        self._batch_size = self._limit = batch_size
        self._timeout_s = sample_timeout_s

    def outcomes(
        self, setting: KnobSetting, sample_ids: Sequence[int]
    ) -> Iterator[list[MeasuredSample | FailedSample]]:
        """What became of the samples, batch by batch; those that cannot be read first.

        A few batches are prepared at a time and put in order of prompt length, so that little is padded. The knobs must
        be in force already.

        Raises:
            OutOfMemory: for a single request; what was yielded before is valid.
            GenerationFailed: the logits of a sample are not finite; what was yielded before is valid.
        """
        self._limit = self._batch_size
        left = list(sample_ids)
        at_once = self._batch_size * _BATCHES_PREPARED
        while left:
            chosen, left = left[:at_once], left[at_once:]
            prepared, failed = self._prepare(chosen, setting)
            yield list(failed)
            prepared.sort(key=lambda pair: pair[1].shape.prompt_tokens)
            while prepared:
                batch, prepared = prepared[: self._limit], prepared[self._limit :]
                yield self._answer(setting, batch)

    def _prepare(self, sample_ids: Sequence[int], setting: KnobSetting) -> tuple[list[Prepared], list[FailedSample]]:
        prepared: list[Prepared] = []
        failed: list[FailedSample] = []
        for sample_id in sample_ids:
            try:
                with time_limit(self._timeout_s):
                    sample, request = self._bench.requests.take(sample_id, setting.vision.crops)
                # As for measured samples: one that no metric could score is not worth the time.
                self._bench.metric.score([answer_to(sample, "")])
            except SampleError as error:
                failed.append(failed_sample(sample_id, error))
            else:
                prepared.append((sample, request))
        return prepared, failed

    def _answer(self, setting: KnobSetting, prepared: Sequence[Prepared]) -> list[MeasuredSample | FailedSample]:
        """A batch that is out of time, or whose logits are not finite, is answered one by one, which tells its samples
        apart.
        """
        done: list[MeasuredSample | FailedSample] = []
        size = self._limit
        while len(done) < len(prepared):
            part = prepared[len(done) : len(done) + min(size, self._limit)]
            try:
                with failure_named(f"sample {part[0][0].sample_id}", self._bench.model.describe):
                    answers = self._together([request for _, request in part])
            except GenerationFailed:
                if len(part) == 1:
                    raise
                size = 1
                continue
            except SampleTimedOut as error:
                if len(part) == 1:
                    done.append(failed_sample(part[0][0].sample_id, error))
                size = 1
                continue
            if answers is None:
                self._limit = len(part) // 2
                release_cached_memory(self._bench.model.device)
                continue
            done += [
                sample_record(self._bench.model, setting, sample, request, answer=answer)
                for (sample, request), answer in zip(part, answers, strict=True)
            ]
        return done

    def _together(self, requests: Sequence[PreparedRequest]) -> list[BatchedAnswer] | None:
        """The answers to several samples together; None where memory ran out for more than one."""
        try:
            with out_of_memory_named(), time_limit(self._timeout_s and self._timeout_s * len(requests)):
                inputs = [self._bench.model.to_device(request.inputs) for request in requests]
                answers = self._bench.model.answer_batch(inputs, self._bench.max_new_tokens)
        except OutOfMemory:
            if len(requests) == 1:
                raise
            return None
        ends = self._bench.model.eos_token_ids
        return [BatchedAnswer(tokens, tokens[-1] in ends, len(requests), self._limit) for tokens in answers]


def failed_sample(sample_id: int, error: SampleError) -> FailedSample:
    """The record of a sample that ended in this error."""
    return FailedSample(sample_id=sample_id, error=type(error).__name__, reason=str(error))


GroupKey = tuple[CropRange, int | None, tuple[int, ...]]


@dataclass(frozen=True)
class PreparedQuestion:
    """A question to be answered at a setting of its own; a sample without a picture will do."""

    request: PreparedRequest
    setting: KnobSetting


def answer_prepared(
    model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int, max_batch_size: int
) -> list[tuple[int, ...]]:
    """Token ids of each answer in the order of the questions, end-of-sequence included where it came.

    In float32 they are those of each question alone at its setting. The setting in force before comes back, also after
    an error.

    Raises:
        ConfigurationError: a setting that the model does not have, or `max_batch_size` below 1.
        OutOfMemory: a batch does not fit; give a smaller `max_batch_size`.
        GenerationFailed: logits are not finite.
    """
    answers: dict[int, tuple[int, ...]] = {}
    with model.restored_afterwards():
        for places in batches_of(questions, max_batch_size):
            model.apply(questions[places[0]].setting)
            with out_of_memory_named():
                inputs: list[Mapping[str, Any]] = [model.to_device(questions[place].request.inputs) for place in places]
                answers.update(zip(places, model.answer_batch(inputs, max_new_tokens), strict=True))
    return [answers[place] for place in range(len(questions))]


def batches_of(questions: Sequence[PreparedQuestion], max_batch_size: int) -> list[tuple[int, ...]]:
    """Places of the questions that are computed together: same crops, top-k and blocks, at most so many.

    Groups come in the order of their first question. Within a group shorter prompts come first, so that little is
    padded.

    Raises:
        ConfigurationError: `max_batch_size` below 1.
    """
    if max_batch_size < 1:
        raise ConfigurationError(f"batches of {max_batch_size} contain nothing; give a max_batch_size of at least 1")
    groups: dict[GroupKey, list[int]] = {}
    for place, question in enumerate(questions):
        setting = question.setting
        groups.setdefault((setting.vision.crops, setting.top_k, setting.active_blocks), []).append(place)
    batches = []
    for places in groups.values():
        places.sort(key=lambda place: questions[place].request.shape.prompt_tokens)
        batches += [tuple(places[at : at + max_batch_size]) for at in range(0, len(places), max_batch_size)]
    return batches
