"""Graphed prefills on a GPU: one CUDA graph for each setting and padded prompt length.

Prompts are padded on the right to a multiple of 64 tokens. Importing this module does not need Triton; making an engine
does.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from experiment_core_utils.engines.api import (
    PausedPrefillEngine,
    PrefillEngine,
    refuse_without_free_rows,
)
from experiment_core_utils.engines.cuda_graphs import CudaGraphPool
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.expert_trace import ExpertRecord
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights, RotaryTable
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.triton_build import built, kernels_unsupported_reason

# Prompt lengths are rounded up to a multiple of this.
BUCKET = 64


@dataclass(frozen=True)
class PaddedPrompt:
    """What the graphs of one padded length T read; all but the length are the beginnings of longer buffers."""

    hidden: torch.Tensor  # [T, H]
    # Its own, so that it is never above T: a capture runs with what the last request left here.
    length: torch.Tensor  # one int64, 1 to T
    rotary: tuple[torch.Tensor, torch.Tensor]  # [T or more, D / 2] each
    # [T or more, H] each, made where a prompt has states to add; zeros from the prompt's end to T.
    added: list[torch.Tensor]

    def load(self, embeddings: torch.Tensor, appended: torch.Tensor | None = None) -> None:
        """The prompt [tokens, H], and a row [H] behind it where there is one, padded with zeros."""
        tokens = embeddings.shape[0]
        self.hidden[:tokens].copy_(embeddings)
        self.hidden[tokens:].zero_()
        if appended is not None:
            self.hidden[tokens].copy_(appended)
            tokens += 1
        self.length.fill_(tokens)

    def load_added(self, added: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States [tokens, H] to add after each of the first blocks; returns what graphs read of them."""
        while len(self.added) < len(added):
            with torch.inference_mode(False), torch.no_grad():
                self.added.append(self.hidden.new_zeros(len(self.rotary[0]), self.hidden.shape[1]))
        read = [own[: len(self.hidden)] for own in self.added[: len(added)]]
        for own, states in zip(read, added, strict=True):
            own[: len(states)].copy_(states)
            own[len(states) :].zero_()
        return read


class PromptBuffers:
    """The buffers of prompts of all lengths: those of up to a power of two share one, as only one graph runs at a time.

    All together are at most four times as long as the longest prompt.

    Args:
        rotary: for a number of positions the factors of the positions from 0, [positions, D / 2] each.
    """

    def __init__(
        self, decoder: DecoderWeights, rotary: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._decoder, self._rotary = decoder, rotary
        self._prompts: dict[int, PaddedPrompt] = {}
        # By their length.
        self._shared: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {}

    def of(self, padded: int) -> PaddedPrompt:
        """The prompt of a padded length; at first of one token, of any content."""
        if padded not in self._prompts:
            decoder, rows = self._decoder, 1 << (padded - 1).bit_length()
            with torch.inference_mode(False), torch.no_grad():
                if rows not in self._shared:
                    hidden = torch.zeros(rows, decoder.width, dtype=decoder.dtype, device=decoder.device)
                    self._shared[rows] = hidden, self._rotary(rows), []
                hidden, rotary, added = self._shared[rows]
                length = torch.ones(1, dtype=torch.int64, device=decoder.device)
                self._prompts[padded] = PaddedPrompt(hidden[:padded], length, rotary, added)
        return self._prompts[padded]


@dataclass(frozen=True)
class _Noted:
    """A call, and the place of its experts' ids."""

    record: ExpertRecord
    padded: int
    tokens: int
    last_block: int


def graphed_prefill_unsupported_reason(decoder: DecoderWeights) -> str | None:
    """The reason why this decoder's prefill cannot be captured; None where it can."""
    if (reason := kernels_unsupported_reason(decoder.device, _kernels)) is not None:
        return reason
    if decoder.head_width % 2:
        return f"its heads are {decoder.head_width} wide, which has no halves to turn"
    # Dense layers are torch's products.
    sizes = (("hidden width", decoder.width), ("experts' width", decoder.expert_width)) if decoder.routed_blocks else ()
    for what, size in sizes:
        if size % 16:
            return f"its {what} is {size}, not a multiple of 16"
    return None


class _PaddedPrefill:
    """What the prefills with and without a pause have in common.

    Raises:
        ConfigurationError: the reason, where the decoder cannot be captured.
    """

    def __init__(self, decoder: DecoderWeights, graphs: CudaGraphPool | None = None) -> None:
        reason = graphed_prefill_unsupported_reason(decoder)
        if reason is not None:
            raise ConfigurationError(f"the prefill cannot be captured: {reason}")
        self._decoder = decoder
        self._kernels = _kernels()
        self._graphs = CudaGraphPool() if graphs is None else graphs
        self._prompts = PromptBuffers(decoder, partial(self._kernels.rotary_table, decoder))
        self._records: dict[int, ExpertRecord] = {}

    def _record_of(self, most: int) -> ExpertRecord:
        """For up to so many expert ids a block; one serves prompts of all lengths, as only one graph runs at a time."""
        if most not in self._records:
            self._records[most] = ExpertRecord.allocate(self._decoder, most)
        return self._records[most]

    def _places(
        self,
        prompt: PaddedPrompt,
        kv_cache: KVCache,
        rows: slice,
        used: torch.Tensor,
        request: int = 0,
        added: Sequence[torch.Tensor] = (),
    ) -> Any:
        keys, values = kv_cache.keys[rows, request], kv_cache.values[rows, request]
        return self._kernels.PromptPlaces(prompt.length, keys, values, prompt.rotary, used, added)

    def _capture(self, name: Hashable, run: Callable[[], torch.Tensor]) -> None:
        with built("the kernels of the prefill", ConfigurationError):
            self._graphs.capture(name, run)

    def _capture_logits(
        self,
        name: Hashable,
        run: Callable[..., torch.Tensor],
        prompt: PaddedPrompt,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        used: torch.Tensor,
        request: int = 0,
        ran: int = 0,
    ) -> None:
        """A graph of the blocks of the setting but the first `ran`, and of the choice of the first token."""
        places = self._places(prompt, kv_cache, slice(ran, len(knobs.blocks)), used, request)
        next_token = kv_cache.next_tokens[request : request + 1]

        def logits() -> torch.Tensor:
            found = run(self._decoder, prompt.hidden, knobs.blocks[ran:], knobs.top_k, places)
            next_token.copy_(found.argmax(dim=-1))
            return found

        self._capture(name, logits)


class GraphedPrefill(_PaddedPrefill, PrefillEngine):
    """A `PrefillEngine` of one request at a time.

    Making a length ready runs a prompt of zeros: the slots of that request are overwritten.

    Raises:
        ConfigurationError: the reason, where the decoder cannot be captured.
    """

    def __init__(self, decoder: DecoderWeights, graphs: CudaGraphPool | None = None) -> None:
        super().__init__(decoder, graphs)
        self._noted: _Noted | None = None
        # Lengths of buffers whose rotary factors are not those of the positions from 0.
        self._turned: set[int] = set()

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        """Request 0 is what is captured."""
        self._capture_graphs(knobs, kv_cache, tokens, 0)

    @torch.inference_mode()
    def prefill(
        self, embeddings: torch.Tensor, knobs: EngineKnobs, kv_cache: KVCache, request: int = 0
    ) -> torch.Tensor:
        """Afterwards `kv_cache.next_tokens` of the request is the likeliest token."""
        name = self._capture_graphs(knobs, kv_cache, len(embeddings), request)
        return self._replay(name, embeddings, knobs, kv_cache, None)

    @torch.inference_mode()
    def last_state(
        self,
        embeddings: torch.Tensor,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        rotary: RotaryTable | None = None,
        added: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """It is captured first where none was."""
        padded = _refuse_too_long(len(embeddings), kv_cache)
        prompt, record = self._prompts.of(padded), self._record_for(knobs, kv_cache)
        given = prompt.load_added(added)
        name = ("state", knobs, padded, kv_cache.keys.data_ptr(), len(given))
        if name not in self._graphs:
            places = self._places(prompt, kv_cache, slice(len(knobs.blocks)), record.ids, added=given)
            work = partial(self._kernels.last_state, self._decoder, prompt.hidden, knobs.blocks, knobs.top_k, places)
            self._capture(name, work)
        return self._replay(name, embeddings, knobs, kv_cache, rotary)

    def _replay(
        self,
        name: Hashable,
        embeddings: torch.Tensor,
        knobs: EngineKnobs,
        kv_cache: KVCache,
        rotary: RotaryTable | None,
    ) -> torch.Tensor:
        """Run the graph of that name over embeddings [T, H]; what it gives is overwritten by the next one."""
        tokens = len(embeddings)
        padded = _padded_length(tokens, kv_cache)
        self._prompts.of(padded).load(embeddings)
        self._turn(padded, rotary)
        self._noted = _Noted(self._record_for(knobs, kv_cache), padded, tokens, knobs.blocks[-1])
        return self._graphs.replay(name)

    def _turn(self, padded: int, rotary: RotaryTable | None) -> None:
        """Put the factors of a prompt's positions where its graphs read them; None for those of 0 to T - 1."""
        factors, half = self._prompts.of(padded).rotary, self._decoder.head_width // 2
        rows = len(factors[0])
        if rotary is not None:
            self._turned.add(rows)
            # Both halves are alike but for the sign of the first.
            for own, given in zip(factors, (rotary.cosine, rotary.sine), strict=True):
                own[: len(given)].copy_(given[:, 0, half:])
        elif rows in self._turned:
            self._turned.remove(rows)
            for own, usual in zip(factors, self._kernels.rotary_table(self._decoder, rows), strict=True):
                own.copy_(usual)

    def forget_experts(self) -> None:
        self._noted = None
        for record in self._records.values():
            record.forget()

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        """See `ExpertTrace.topk_expert_ids`; on the host, without the rows that pad the prompt.

        T is 1 in the last block, of which only the last position is computed.
        """
        noted = self._noted
        if noted is None:
            return {}
        found = noted.record.of_tokens(noted.padded, noted.last_block)
        return {block: ids[: noted.tokens] for block, ids in found.items()}

    def _record_for(self, knobs: EngineKnobs, kv_cache: KVCache) -> ExpertRecord:
        """One for the prompts of all lengths that fit into the KV cache."""
        return self._record_of(kv_cache.max_seq_len * max(knobs.top_k, self._decoder.default_top_k))

    @torch.inference_mode()
    def _capture_graphs(self, knobs: EngineKnobs, kv_cache: KVCache, tokens: int, request: int) -> Hashable:
        """The name of the graph, captured if it was not there."""
        padded = _refuse_too_long(tokens, kv_cache)
        name = ("prefill", knobs, padded, kv_cache.keys.data_ptr(), request)
        if name not in self._graphs:
            prompt, used = self._prompts.of(padded), self._record_for(knobs, kv_cache).ids
            self._capture_logits(name, self._kernels.prefill, prompt, knobs, kv_cache, used, request)
        return name


class GraphedPausedPrefill(_PaddedPrefill, PausedPrefillEngine):
    """A `PausedPrefillEngine`.

    Warming up a length runs a prompt of zeros: keys and values of the request are overwritten.

    Raises:
        ConfigurationError: the reason, where the decoder cannot be captured.
    """

    def __init__(self, decoder: DecoderWeights, graphs: CudaGraphPool) -> None:
        super().__init__(decoder, graphs)
        # States behind the pause, and the prompt's length without the row behind it.
        self._paused = PromptBuffers(decoder, lambda rows: self._prompts.of(rows).rotary)
        self._last_two = torch.tensor([2, 1], device=decoder.device)
        # Of the prompt that began last: its padded length, and how many blocks have run.
        self._began = (0, 0)

    @torch.inference_mode()
    def warm_up(self, pause: int, knobs: EngineKnobs, kv_cache: KVCache, tokens: int) -> None:
        padded = self._padded_with_row(tokens, kv_cache)
        self._first_part(padded, pause, kv_cache)
        self._second_part(padded, pause, knobs, kv_cache)

    @torch.inference_mode()
    def begin(
        self, embeddings: torch.Tensor, appended: torch.Tensor | None, pause: int, kv_cache: KVCache
    ) -> torch.Tensor:
        tokens = embeddings.shape[0]
        padded = self._padded_with_row(tokens, kv_cache)
        name = self._first_part(padded, pause, kv_cache)
        self._prompts.of(padded).load(embeddings, appended)
        self._paused.of(padded).length.fill_(tokens)
        self._began = padded, pause
        states = self._graphs.replay(name)
        return states if appended is not None else states[1:]

    @torch.inference_mode()
    def finish(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """Afterwards `kv_cache.next_tokens` is the likeliest token."""
        padded, pause = self._began
        return self._graphs.replay(self._second_part(padded, pause, knobs, kv_cache))

    def _padded_with_row(self, tokens: int, kv_cache: KVCache) -> int:
        """The padded length of a prompt and the row behind it."""
        refuse_without_free_rows(tokens, kv_cache)
        return _padded_length(tokens + 1, kv_cache)

    def _first_part(self, padded: int, pause: int, kv_cache: KVCache) -> Hashable:
        """The name of the graph, captured if it was not there."""
        name = ("begin", pause, padded, kv_cache.keys.data_ptr())
        if name in self._graphs:
            return name
        prompt, paused, decoder = self._prompts.of(padded), self._paused.of(padded), self._decoder
        used = self._record_of(padded * decoder.default_top_k).ids
        places = self._places(prompt, kv_cache, slice(pause), used)

        def run() -> torch.Tensor:
            states = self._kernels.begin(decoder, prompt.hidden, pause, places)
            # Graphs share what memory they need in between.
            paused.hidden.copy_(states)
            return states.index_select(0, (prompt.length - self._last_two).clamp_(min=0)).float()

        self._capture(name, run)
        return name

    def _second_part(self, padded: int, pause: int, knobs: EngineKnobs, kv_cache: KVCache) -> Hashable:
        """Name of the graph of what follows a pause, captured at first use."""
        name = ("finish", pause, knobs, padded, kv_cache.keys.data_ptr())
        if name not in self._graphs:
            paused, used = self._paused.of(padded), self._record_of(padded * knobs.top_k).ids
            self._capture_logits(name, self._kernels.finish, paused, knobs, kv_cache, used, ran=pause)
        return name


def _refuse_too_long(tokens: int, kv_cache: KVCache) -> int:
    """The padded length of a prompt that fits into the KV cache."""
    if tokens > kv_cache.max_seq_len:
        raise ConfigurationError(
            f"a prompt of {tokens} tokens does not fit into a KV cache of {kv_cache.max_seq_len} tokens"
        )
    return _padded_length(tokens, kv_cache)


def _padded_length(tokens: int, kv_cache: KVCache) -> int:
    return min(-(-tokens // BUCKET) * BUCKET, kv_cache.max_seq_len)


def _kernels() -> Any:
    """Triton may be missing; then ImportError."""
    from experiment_core_utils.engines.gpu.triton import prefill_forward

    return prefill_forward
