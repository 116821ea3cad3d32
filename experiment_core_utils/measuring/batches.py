"""Answers of samples whose latency is not measured: one by one as the measured ones, or in batches of modules.

Blocks of some families of transformers look at the padding of a prompt, or at the other requests of a batch. So
batching is proven, in each process and for each setting: see `BatchProof`. Engines and graphs answer alone what they
answer alone when they are timed, so that a setting has one execution.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from experiment_core_utils.engines.engine_proof import higher_precision, is_right
from experiment_core_utils.engines.greedy import MOST_POSITIONS
from experiment_core_utils.g_metrics_inference import sample_record
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS, blocks_of
from experiment_core_utils.knobs.batch_size import batch_size_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import TOP_K, experts_of
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS, CropRange, vision_of
from experiment_core_utils.measuring.request_source import RequestSource
from experiment_core_utils.models.interface import Concurrent, Inspectable, Runnable, StagedModel, answers_in_batches
from experiment_core_utils.primitives.device import NoMarks, out_of_memory_named, release_cached_memory
from experiment_core_utils.primitives.errors import (
    ConfigurationError,
    EngineRefused,
    GenerationFailed,
    OutOfMemory,
    SampleError,
    library_faults_named,
)
from experiment_core_utils.primitives.finite_logits import failure_named
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import BatchedAnswer, FollowedAnswer, KnobProof, PreparedRequest
from experiment_core_utils.records.sample_result import FailedSample, failed_sample
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.interface import Metric, Sample, check_scorable

LOGGER = logging.getLogger(__name__)
Prepared = tuple[Sample, PreparedRequest]
# Batches whose samples are put in order of length together; more would pad less and take more memory of the host.
_BATCHES_PREPARED = 4


def untimed_line(num_answered: int, num_timed: int, num_runs_per_sample: int, engines: Mapping[str, str]) -> str | None:
    """What a run says, once its model is loaded, of samples that are answered one by one; None where none are.

    Args:
        num_answered: samples of each setting that are not timed.
        num_timed: the others, each of which runs `num_runs_per_sample` times.
        engines: what runs each stage, by name.
    """
    if not num_answered or answers_in_batches(engines):
        return None
    requests, names = num_answered + num_timed * num_runs_per_sample, ", ".join(dict.fromkeys(engines.values()))
    return (
        f"answers: {counted(num_answered, 'sample')} of each setting that are not timed are answered one by one, by "
        f"what runs the timed ones ({names}): {num_answered} of its {requests} requests, or about "
        f"{num_answered / requests:.0%} of its time; --num_samples takes fewer"
    )


# Mean distance of logits by which a batch may differ from its requests alone, as a fraction of their norm: in float32,
# where rounding makes 1e-6 on a CPU and 4e-4 on a GPU, and in lower precision where no higher one can judge. There
# rounding made up to 1.6 %, or 12 % at single positions whose token went to other experts.
MOST_BATCH_ERROR, MOST_UNJUDGED_ERROR = 0.01, 0.08


def batch_fault(together: FollowedAnswer, alone: FollowedAnswer) -> str | None:
    """What is wrong in float32 with a request's part of a batch, against the same request alone; None where nothing is.

    Args:
        together: tokens and logits of the batch's own answer.
        alone: what the request alone makes of that answer.
    """
    if together.likeliest != alone.likeliest:
        return "tokens are others than those of the request alone"
    return _far(together, alone, MOST_BATCH_ERROR)


def rounded_batch_fault(
    together: FollowedAnswer, alone: FollowedAnswer, exact: FollowedAnswer | None, dtype: torch.dtype
) -> str | None:
    """As `batch_fault` in lower precision, where rounding may choose other tokens: both are compared with the modules
    in higher precision, as engines are.

    Args:
        exact: what these make of the answer; None where they cannot.
        dtype: the precision of the other two.
    """
    if exact is None:
        return _far(together, alone, MOST_UNJUDGED_ERROR)
    batch, single = (float(_distances(found, exact).mean()) for found in (together, alone))
    if is_right(batch, single, dtype):
        return None
    return (
        f"logits are off by {batch:.3g} from the modules in {str(higher_precision(dtype)).removeprefix('torch.')}, and "
        f"those of the request alone by {single:.3g}"
    )


def _far(together: FollowedAnswer, alone: FollowedAnswer, most: float) -> str | None:
    error = float(_distances(together, alone).mean())
    return None if error <= most else f"logits differ by {error:.1%} from those of the request alone"


def _distances(found: FollowedAnswer, exact: FollowedAnswer) -> torch.Tensor:
    """The relative distances of the logits of each position."""
    logits = exact.logits.to(found.logits.dtype)
    return (found.logits - logits).norm(dim=-1) / logits.norm(dim=-1)


class BatchProof:
    """Answers in batches at one setting, as long as they are those of each request alone.

    Of the first batch, the most padded request and another one are answered alone too; so they are of every later batch
    with a longer padded prompt, more padding or more differing pictures than those before. The setting must be in force
    whenever this is used.

    Args:
        setting: that is in force, where it changes the length of prompts.

    Attributes:
        setting: as given.
        reason: why requests have to be answered one by one; None while batches are right.
    """

    def __init__(self, model: Runnable, max_new_tokens: int, setting: Setting | None = None) -> None:
        self._judge = model if isinstance(model, Inspectable) else None
        # Requests to a server stay requests of their own, whatever it does with several at a time.
        are_apart = isinstance(model, Concurrent) and model.concurrency > 1
        is_right = self._judge is not None or are_apart
        self.reason = None if is_right else "the model does not show the logits of a batch"
        self.setting = setting or Setting({})
        self._model = model
        self._max_new_tokens = max_new_tokens
        self._proven = (-1, -1, -1)

    def is_new(self, requests: Sequence[PreparedRequest]) -> bool:
        """Whether a batch of these requests has to be compared with each of them alone."""
        extent = _extent([replace(each, shape=self.setting.shape(each.shape)) for each in requests])
        return any(new > old for new, old in zip(extent, self._proven, strict=True))

    def answer(self, requests: Sequence[PreparedRequest]) -> list[tuple[int, ...]] | None:
        """Token ids of the greedy answer to each request, end-of-sequence included where it came.

        None for several requests where batches are wrong: from then on only single ones are answered.

        Raises:
            GenerationFailed: the logits of a single request are not finite.
        """
        if len(requests) > 1 and self.reason is not None:
            return None
        requests = [replace(each, shape=self.setting.shape(each.shape)) for each in requests]
        inputs = [self._model.to_device(request.inputs) for request in requests]
        try:
            answers = self._model.answer_batch(inputs, self._max_new_tokens)
        except GenerationFailed as error:
            if len(requests) == 1:
                raise
            self.reason = f"in a batch of {len(requests)} {error}"
            return None
        if self._judge is None:
            return answers
        extent = _extent(requests)
        if len(requests) == 1 or all(new <= old for new, old in zip(extent, self._proven, strict=True)):
            return answers
        fault = self._fault(requests, inputs, answers)
        if fault is not None:
            self.reason = f"in a batch of {len(requests)} {fault}"
            return None
        first, second, third = map(max, extent, self._proven)
        self._proven = first, second, third
        return answers

    def answer_all(self, requests: Sequence[PreparedRequest]) -> list[tuple[int, ...]]:
        """The answers of `answer`, one by one where batches are wrong."""
        together = self.answer(requests)
        if together is not None:
            return together
        return [answer for request in requests for answer in self.answer([request]) or ()]

    def _fault(
        self,
        requests: Sequence[PreparedRequest],
        inputs: Sequence[Mapping[str, Any]],
        answers: Sequence[tuple[int, ...]],
    ) -> str | None:
        described = self._model.describe()
        dtype = getattr(torch, str(described.get("dtype") or "float32"))
        assert self._judge is not None  # otherwise nothing is compared
        is_float32 = dtype == torch.float32 and not described.get("quantisation")
        together = self._judge.follow_batch(inputs, [answer[:MOST_POSITIONS] for answer in answers])
        for row in _rows_to_prove(requests):
            (alone,) = self._judge.follow_batch([inputs[row]], [answers[row]])
            of_batch = FollowedAnswer(answers[row], together[row].logits)
            if is_float32:
                fault = batch_fault(of_batch, alone)
                if fault is not None and self._is_exact(inputs[row], of_batch, dtype):
                    fault = None
            else:
                fault = rounded_batch_fault(of_batch, alone, _exact(self._judge, inputs[row], answers[row]), dtype)
            if fault is not None:
                return fault
        return None

    def _is_exact(self, inputs: Mapping[str, Any], of_batch: FollowedAnswer, dtype: torch.dtype) -> bool:
        """Whether a batch is as near to the modules in higher precision as rounding allows by itself.

        Then the request alone differs from it by its own rounding, which decides between two experts that are as likely
        as each other.
        """
        assert self._judge is not None  # otherwise nothing is compared
        exact = _exact(self._judge, inputs, of_batch.likeliest)
        return exact is not None and is_right(float(_distances(of_batch, exact).mean()), 0.0, dtype)


def warn_of_refused(proofs: Iterable[BatchProof]) -> None:
    """Log in one line at which settings batches were refused, with the first reason; nothing where none were."""
    refused = [proof for proof in proofs if proof.reason is not None]
    if refused:
        keys = ", ".join(dict.fromkeys(proof.setting.key for proof in refused))
        LOGGER.warning("requests are answered one by one at %s: %s", keys, refused[0].reason)


def _exact(judge: Inspectable, inputs: Mapping[str, Any], answer: tuple[int, ...]) -> FollowedAnswer | None:
    try:
        return judge.follow_exactly(inputs, answer)
    except EngineRefused:  # not lost: without a judge the batch is compared with the request alone
        return None


def _rows_to_prove(requests: Sequence[PreparedRequest]) -> tuple[int, int]:
    """The shortest prompt of a batch of at least 2, and the longest of the others that is padded, else the longest.

    Sparse attention goes wrong in long prompts with little padding too, and in short ones not at all.
    """
    lengths = [request.shape.prompt_tokens for request in requests]
    shortest, *others = sorted(range(len(lengths)), key=lengths.__getitem__)
    padded = [row for row in others if lengths[row] < max(lengths)]
    return shortest, (padded or others)[-1]


def _extent(requests: Sequence[PreparedRequest]) -> tuple[int, int, int]:
    """The longest padded prompt of a batch (0 without any), the most padding, and by how many crops pictures differ."""
    tokens = [request.shape.prompt_tokens for request in requests]
    crops = [0 if request.shape.actual is None else request.shape.actual.num_crops for request in requests]
    longest = max(tokens)
    padded = max((length for length in tokens if length < longest), default=0)
    return padded, longest - min(tokens), max(crops) - min(crops)


@dataclass(frozen=True)
class Bench:
    """What is measured: a loaded model, the requests that it answers, and the metric that scores the answers."""

    model: Runnable
    requests: RequestSource  #: gives this process's samples prepared; started and ended by the caller
    max_new_tokens: int
    metric: Metric
    latency_ids: Set[int] = frozenset()  #: the samples to measure; the others are only answered
    engines: Mapping[str, str] | None = None  #: what runs each stage of the model, by name; None where it is not noted
    proofs: Mapping[str, KnobProof] = field(default_factory=dict)  #: of settings that were tried already, by key


class BatchAnswerer:
    """Answers samples in batches, smaller ones where memory runs out, and one by one where batches are wrong, or where
    engines or graphs run the model.

    Args:
        batch_size: most requests in a batch.
        sample_timeout_s: limit for the preparation of each sample, and for a batch times the samples in it.
        results_dir: folder of the results, for tracebacks of samples that a library cannot run; None saves none.
    """

    def __init__(
        self, bench: Bench, batch_size: int, sample_timeout_s: float | None, results_dir: Path | None = None
    ) -> None:
        self._bench = bench
        self._results_dir = results_dir
        # Continuations are scored one request after the other: those of one share its prompt already.
        are_scored = getattr(bench.metric, "scored", None) is not None
        self._are_modules = self._is_together = answers_in_batches(bench.engines) and not are_scored
        self._modules_size = batch_size
        self._batch_size = self._limit = batch_size if self._is_together else 1
        self._timeout_s = sample_timeout_s
        self._proofs: dict[str, BatchProof] = {}

    def warn_of_refused(self) -> None:
        """See the function of this name; of every setting answered so far."""
        warn_of_refused(self._proofs.values())

    def outcomes(self, setting: Setting, sample_ids: Sequence[int]) -> Iterator[list[MeasuredSample | FailedSample]]:
        """What became of the samples, batch by batch; those that cannot be read first.

        A few batches are prepared at a time and put in order of prompt length, so that little is padded. The knobs must
        be in force already.

        Raises:
            OutOfMemory: for a single request; what was yielded before is valid.
            GenerationFailed: the logits of a sample are not finite; what was yielded before is valid.
        """
        # Where requests run together, so do those that are not timed, by what runs the timed ones.
        together = batch_size_of(setting)
        self._is_together = self._are_modules or together > 1
        self._batch_size = together if together > 1 else self._modules_size if self._are_modules else 1
        self._limit = self._batch_size
        left = list(sample_ids)
        at_once = self._batch_size * _BATCHES_PREPARED
        while left:
            chosen, left = left[:at_once], left[at_once:]
            prepared, failed = self._prepare(chosen, setting)
            yield list(failed)
            prepared.sort(key=lambda pair: setting.shape(pair[1].shape).known_prompt_tokens or 0)
            while prepared:
                batch, prepared = prepared[: self._limit], prepared[self._limit :]
                yield self._answer(setting, batch)

    def _prepare(self, sample_ids: Sequence[int], setting: Setting) -> tuple[list[Prepared], list[FailedSample]]:
        prepared: list[Prepared] = []
        failed: list[FailedSample] = []
        for sample_id in sample_ids:
            try:
                with library_faults_named(f"sample {sample_id}"), out_of_memory_named():
                    with time_limit(self._timeout_s):
                        sample, request = self._bench.requests.take(sample_id, vision_of(setting).bounds)
                    # As for measured samples: one that no metric could score is not worth the time.
                    check_scorable(sample, self._bench.metric)
            except SampleError as error:
                failed.append(failed_sample(sample_id, error, self._results_dir))
            else:
                prepared.append((sample, request))
        return prepared, failed

    def _answer(self, setting: Setting, prepared: Sequence[Prepared]) -> list[MeasuredSample | FailedSample]:
        """A batch that is out of time, or that a library refuses, is answered one by one, so that only the samples at
        fault fail."""
        done: list[MeasuredSample | FailedSample] = []
        size = self._limit
        proof = self._proofs.setdefault(setting.key, BatchProof(self._bench.model, self._bench.max_new_tokens, setting))
        while len(done) < len(prepared):
            size = size if proof.reason is None and self._is_together else 1
            part = prepared[len(done) : len(done) + min(size, self._limit)]
            try:
                with failure_named(f"sample {part[0][0].sample_id}", self._bench.model.describe):
                    answers = self._together(proof, part)
            except SampleError as error:
                if len(part) == 1:
                    done.append(failed_sample(part[0][0].sample_id, error, self._results_dir))
                size = 1
                continue
            if answers is None:
                if proof.reason is None:
                    self._limit = len(part) // 2
                    release_cached_memory(self._bench.model.device)
                continue
            done += [
                self._record(setting, sample, request, answer)
                for (sample, request), answer in zip(part, answers, strict=True)
            ]
        return done

    def _record(
        self, setting: Setting, sample: Sample, request: PreparedRequest, answer: BatchedAnswer
    ) -> MeasuredSample | FailedSample:
        try:
            with library_faults_named(f"sample {sample.sample_id}"), out_of_memory_named():
                return sample_record(self._bench.model, setting, sample, request, answer=answer)
        except SampleError as error:
            return failed_sample(sample.sample_id, error, self._results_dir)

    def _together(self, proof: BatchProof, prepared: Sequence[Prepared]) -> list[BatchedAnswer] | None:
        """The answers to several samples; None where memory ran out for more than one, or batches are wrong."""
        requests = [request for _, request in prepared]
        in_time = time_limit(self._timeout_s and self._timeout_s * len(requests))
        try:
            with library_faults_named(f"sample {prepared[0][0].sample_id}"), out_of_memory_named(), in_time:
                if not self._is_together:
                    return [self._as_timed(requests[0])]
                answers = proof.answer(requests)
        except OutOfMemory:
            if len(requests) == 1:
                raise
            return None
        if answers is None:
            return None
        ends, reason = self._bench.model.ends, proof.reason
        limit = self._limit if reason is None else 1
        return [BatchedAnswer(tokens, ends.up_to_end(tokens)[1], len(requests), limit, reason) for tokens in answers]

    def _as_timed(self, request: PreparedRequest) -> BatchedAnswer:
        """The answer to a request, or the scores of its continuations, by what runs the timed ones."""
        model, limit = self._bench.model, self._bench.max_new_tokens
        inputs = model.to_device(request.inputs)
        model.warm_up(inputs, limit)
        found = model.generate_timed(inputs, limit, NoMarks())
        return BatchedAnswer(
            found.token_ids, model.ends.up_to_end(found.token_ids)[1], 1, self._limit, scores=found.scores
        )


GroupKey = tuple[CropRange | None, int | None, tuple[int, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class PreparedQuestion:
    """A question to be answered at a setting of its own; a sample without a picture will do."""

    request: PreparedRequest
    setting: Setting


def answer_prepared(
    model: StagedModel, questions: Sequence[PreparedQuestion], max_new_tokens: int, max_batch_size: int
) -> list[tuple[int, ...]]:
    """Token ids of each answer in the order of the questions, end-of-sequence included where it came.

    In float32 they are those of each question alone at its setting; where batches turn out to give others, questions of
    that setting are answered one by one. The setting in force before comes back, also after an error.

    Raises:
        ConfigurationError: a setting that the model does not have, or `max_batch_size` below 1.
        OutOfMemory: a batch does not fit; give a smaller `max_batch_size`.
        GenerationFailed: logits are not finite.
    """
    answers: dict[int, tuple[int, ...]] = {}
    proofs: dict[GroupKey, BatchProof] = {}
    with model.restored_afterwards():
        for places in batches_of(questions, max_batch_size):
            setting = questions[places[0]].setting
            model.apply(setting)
            proof = proofs.setdefault(_group_key(setting), BatchProof(model, max_new_tokens, setting))
            with out_of_memory_named():
                found = proof.answer_all([questions[place].request for place in places])
            answers.update(zip(places, found, strict=True))
    warn_of_refused(proofs.values())
    return [answers[place] for place in range(len(questions))]


def _group_key(setting: Setting) -> GroupKey:
    own = (VISION_TOKENS.name, TOP_K.name, ACTIVE_BLOCKS.name)
    others = tuple((name, value) for name, value in setting.values.items() if name not in own)
    return vision_of(setting).bounds, experts_of(setting), blocks_of(setting), others


def batches_of(questions: Sequence[PreparedQuestion], max_batch_size: int) -> list[tuple[int, ...]]:
    """Places of the questions that are computed together: same crops, top-k, blocks and other knobs, at most
    so many.

    Groups come in the order of their first question. Within a group shorter prompts come first, so that little is
    padded.

    Raises:
        ConfigurationError: `max_batch_size` below 1.
    """
    if max_batch_size < 1:
        raise ConfigurationError(f"batches of {max_batch_size} contain nothing; give a max_batch_size of at least 1")
    groups: dict[GroupKey, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(_group_key(question.setting), []).append(place)
    batches = []
    for places in groups.values():
        places.sort(key=lambda place: questions[place].request.shape.prompt_tokens)
        batches += [tuple(places[at : at + max_batch_size]) for at in range(0, len(places), max_batch_size)]
    return batches
