"""Greedy answers to batches of requests of any lengths and pictures by engines, decoded together.

Prompts are prefilled one by one, so that none is padded; each decodes at its own length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.api import DecodeEngine
from experiment_core_utils.engines.cuda_graphs import engine_refused, refusal_of
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import BatchFollower, decode_together
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.device import Marks, NoMarks, TokenCopies, release_cached_memory
from experiment_core_utils.records.requests import FollowedAnswer, StageName, TimedBatch
from experiment_core_utils.records.stages import CPU_STEP, REFERENCE

# KV caches grow in these steps, so that longer requests seldom need a new one; graphs are lost with the old one.
SLOT_STEP = 512
Requests = Sequence[Mapping[str, Any]]


def stages_of_batches(stages: Mapping[StageName, str], batch_size: int) -> Mapping[StageName, str]:
    """The name of what runs each stage of batches: the CPU's compiled step is of one request, see `CpuDecode`."""
    is_alone = batch_size == 1 or stages["decode"] != CPU_STEP
    return stages if is_alone else {**stages, "decode": REFERENCE}


class BatchedStages(Protocol):
    """What prefills single requests for a batch."""

    decoder: DecoderWeights

    @property
    def is_graphed(self) -> bool:
        """Whether decode steps are graphed, so that the host need not wait for each."""

    def new_decode_engine(self) -> DecodeEngine:
        """A decode engine for a KV cache of its own."""

    def most_positions(self, inputs: Mapping[str, Any]) -> int:
        """Positions of the KV cache that a request's prompt fills at most."""

    def warm_up(self, knobs: EngineKnobs, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        """Prepare everything that the request alone needs."""

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """The vision stage; None for a request without a picture."""

    def prefill_row(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: Any, kv_cache: KVCache, row: int
    ) -> torch.Tensor:
        """Prefill a request into a row of a KV cache of several; logits [1, V], which the next call may overwrite."""


@dataclass(frozen=True)
class _Steps:
    """Decode steps of a KV cache of several requests."""

    decode: DecodeEngine
    knobs: EngineKnobs
    kv_cache: KVCache
    runs_ahead: bool

    @property
    def device(self) -> torch.device:
        return self.kv_cache.next_tokens.device

    @property
    def last_tokens(self) -> torch.Tensor:
        return self.kv_cache.checked_tokens

    def advance(self) -> None:
        self.decode.step(self.knobs, self.kv_cache)
        self.kv_cache.note_step()


class BatchedExecution:
    """Answers batches; for each size a KV cache is kept, with the engine whose CUDA graphs use it."""

    def __init__(self, stages: BatchedStages) -> None:
        self._stages = stages
        self._made: dict[int, tuple[KVCache, DecodeEngine]] = {}

    def warm_up(self, knobs: EngineKnobs, requests: Requests, max_new_tokens: int) -> None:
        """Prepare everything that the batch needs, and each of its requests alone."""
        for request in requests:
            self._stages.warm_up(knobs, request, max_new_tokens)
        kv_cache, decode = self._kv_cache_for(requests, max_new_tokens)
        decode.warm_up(knobs, kv_cache)

    @torch.inference_mode()
    def answer_batch(
        self,
        knobs: EngineKnobs,
        requests: Requests,
        max_new_tokens: int,
        ends: AnswerEnds,
        marks: Marks | None = None,
    ) -> TimedBatch:
        """The answers, with marks as `decode_together` sets them, before it one at the hand-over and one behind all
        pictures.
        """
        marks = NoMarks() if marks is None else marks
        kv_cache, decode = self._kv_cache_for(requests, max_new_tokens)
        decode.warm_up(knobs, kv_cache)
        steps = _Steps(decode, knobs, kv_cache, self._stages.is_graphed)
        tokens = TokenCopies(steps.device, max_new_tokens, len(requests))
        marks.mark()
        features = [self._stages.encode_image(request) for request in requests]
        has_picture = any(each is not None for each in features)
        if has_picture:
            marks.mark()
        self._prefill(knobs, requests, features, kv_cache)
        return decode_together(steps, tokens, ends, marks, has_picture=has_picture)

    @torch.inference_mode()
    def follow_batch(
        self, knobs: EngineKnobs, requests: Requests, answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        follower = BatchFollower(answers, self._stages.decoder.device)
        kv_cache, decode = self._kv_cache_for(requests, follower.num_positions)
        decode.warm_up(knobs, kv_cache)
        features = [self._stages.encode_image(request) for request in requests]
        tokens = follower.follow(self._prefill(knobs, requests, features, kv_cache))
        for _ in range(follower.num_positions - 1):
            kv_cache.next_tokens.copy_(tokens.flatten())
            tokens = follower.follow(decode.step(knobs, kv_cache))
            kv_cache.note_step()
        return follower.followed

    def _prefill(
        self, knobs: EngineKnobs, requests: Requests, features: Sequence[Any], kv_cache: KVCache
    ) -> torch.Tensor:
        """The prefills' logits [B, V], whose likeliest tokens are the first of each row."""
        rows = [
            self._stages.prefill_row(knobs, request, own, kv_cache, row).clone()
            for row, (request, own) in enumerate(zip(requests, features, strict=True))
        ]
        logits = torch.cat(rows)
        kv_cache.put_likeliest(logits)
        return logits

    def warm_up_or_refuse(self, warm_up: Callable[[], Any], number: int, tokens: int, max_new_tokens: int) -> None:
        """Warm up for so many requests, of at most `tokens` tokens each; where that is refused, once more without the
        KV caches of other sizes.

        Raises:
            EngineRefused: it cannot be done, with the reason; its memory is released.
        """
        for _ in range(1 + bool(self._made)):
            reason = refusal_of(warm_up, tokens, max_new_tokens)
            if reason is None:
                return
            self.release()
            release_cached_memory(self._stages.decoder.device)
        raise engine_refused(f"batches of {number}: {reason}")

    def release(self) -> None:
        """Release the KV caches and the CUDA graphs that use them."""
        self._made.clear()

    def _kv_cache_for(self, requests: Requests, max_new_tokens: int) -> tuple[KVCache, DecodeEngine]:
        """The KV cache of before where it fits; else that one is released first, as it is large, with its CUDA
        graphs.
        """
        batch, max_seq_len = len(requests), max(map(self._stages.most_positions, requests)) + max_new_tokens
        if batch not in self._made or self._made[batch][0].max_seq_len < max_seq_len:
            self._made.pop(batch, None)
            kv_cache = KVCache.allocate(self._stages.decoder, -(-max_seq_len // SLOT_STEP) * SLOT_STEP, batch)
            self._made[batch] = kv_cache, self._stages.new_decode_engine()
        return self._made[batch]
