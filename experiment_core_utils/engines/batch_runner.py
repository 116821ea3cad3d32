"""Greedy answers to batches of requests of any lengths and pictures by engines, decoded together.

Prompts are prefilled one by one, so that none is padded; each decodes at its own length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.engines.api import DecodeEngine
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.greedy import BatchAnswers, BatchFollower
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.runner import SLOT_STEP, EngineStages
from experiment_core_utils.engines.select import decode_engine
from experiment_core_utils.records.requests import FollowedAnswer


class BatchedExecution:
    """Answers batches; one KV cache of several requests is kept, with the engine whose CUDA graphs use it."""

    def __init__(self, stages: EngineStages) -> None:
        self._stages = stages
        self._made: tuple[KVCache, DecodeEngine] | None = None

    @torch.inference_mode()
    def answer_batch(
        self,
        knobs: EngineKnobs,
        requests: Sequence[Mapping[str, Any]],
        max_new_tokens: int,
        ends: AnswerEnds,
    ) -> list[tuple[int, ...]]:
        kv_cache, decode, _ = self._prefilled(knobs, requests, max_new_tokens)
        answers = BatchAnswers(kv_cache.checked_tokens, ends)
        for _ in range(max_new_tokens - 1):
            if answers.have_ended:
                break
            decode.step(knobs, kv_cache)
            kv_cache.note_step()
            answers.add(kv_cache.checked_tokens)
        return answers.token_ids

    @torch.inference_mode()
    def follow_batch(
        self, knobs: EngineKnobs, requests: Sequence[Mapping[str, Any]], answers: Sequence[tuple[int, ...]]
    ) -> list[FollowedAnswer]:
        follower = BatchFollower(answers, self._stages.decoder.device)
        kv_cache, decode, logits = self._prefilled(knobs, requests, follower.num_positions)
        tokens = follower.follow(logits)
        for _ in range(follower.num_positions - 1):
            kv_cache.next_tokens.copy_(tokens.flatten())
            tokens = follower.follow(decode.step(knobs, kv_cache))
            kv_cache.note_step()
        return follower.followed

    def _prefilled(
        self, knobs: EngineKnobs, requests: Sequence[Mapping[str, Any]], max_new_tokens: int
    ) -> tuple[KVCache, DecodeEngine, torch.Tensor]:
        """The KV cache of all requests with their first tokens, its decode engine, and the prefills' logits [B, V]."""
        lengths = [self._stages.model.length(request) for request in requests]
        kv_cache, decode = self._kv_cache_for(len(requests), max(lengths) + max_new_tokens)
        rows = []
        for row, request in enumerate(requests):
            logits, state = self._stages.prefill(knobs, request, self._stages.encode_image(request))
            rows.append(logits.clone())
            self._stages.place_in(kv_cache, row, state)
        logits = torch.cat(rows)
        kv_cache.put_likeliest(logits)
        kv_cache.set_lengths(lengths)
        decode.warm_up(knobs, kv_cache)
        return kv_cache, decode, logits

    def release(self) -> None:
        """Release the KV cache and the CUDA graphs that use it."""
        self._made = None

    def _kv_cache_for(self, batch: int, max_seq_len: int) -> tuple[KVCache, DecodeEngine]:
        """The KV cache of before where it fits; else that one is released first, as it is large, with its CUDA
        graphs.
        """
        if self._made is None or self._made[0].batch != batch or self._made[0].max_seq_len < max_seq_len:
            self._made = None
            decoder = self._stages.decoder
            kv_cache = KVCache.allocate(decoder, -(-max_seq_len // SLOT_STEP) * SLOT_STEP, batch)
            self._made = kv_cache, decode_engine(decoder)
        return self._made
