"""Graphed decode steps on a GPU: one CUDA graph for each setting and KV cache.

The graph chooses the next token, puts it where the next step reads it, and advances the cache's lengths, so a replay
needs nothing from the host. `graphed_decode_unsupported_reason` says why a decoder cannot be captured.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from experiment_core_utils.engines.api import DecodeEngine
from experiment_core_utils.engines.cuda_graphs import WARM_UPS, CudaGraphPool
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.gpu.triton.tuning import (
    FEWEST_ROWS,
    Card,
    batch_tiles_for,
    tiles_for,
    tuning_at,
)
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.engines.weights import DecoderWeights
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.triton_build import are_interpreted, built, vendor_unsupported_reason

# What one program keeps in registers and shared memory: experts to rank, and one row of a weight.
MOST_EXPERTS, MOST_WIDTH = 512, 16384


def graphed_decode_unsupported_reason(decoder: DecoderWeights) -> str | None:
    """The reason why a decode step of this decoder cannot be captured; None where it can."""
    if decoder.device.type != "cuda" and not are_interpreted():
        return f"CUDA graphs need a GPU, and the model is on {decoder.device}"
    return vendor_unsupported_reason() or shape_unsupported_reason(decoder)


def shape_unsupported_reason(decoder: DecoderWeights) -> str | None:
    """The reason why the kernels do not cover the decoder's dtype and widths; None where they do."""
    if decoder.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bfloat16, float16 and float32, not {str(decoder.dtype).removeprefix('torch.')}"
    if decoder.head_width % 2:
        return f"the kernels turn the halves of a head, which {decoder.head_width} values do not have"
    if decoder.num_experts > MOST_EXPERTS:
        return f"the kernels rank up to {MOST_EXPERTS} experts, not {decoder.num_experts}"
    # Down-projections are cut into parts.
    widest = max(decoder.width, decoder.num_heads * decoder.head_width)
    if widest > MOST_WIDTH:
        return f"the kernels take rows of up to {MOST_WIDTH} values, not {widest}"
    for block in decoder.blocks:
        behind = block.post_attention_norm is not None, block.post_ffn_norm is not None
        if any(behind) and not (all(behind) and not decoder.routed_blocks and block.ffn_norm is None):
            return "the kernels of a GPU compute norms behind a block's parts where dense blocks have no others"
    return None


def can_share_weights(decoder: DecoderWeights) -> bool:
    """Whether the blocks' form and their widths allow a step that reads weights once for all requests."""
    has_form = all(
        block.router is not None
        and block.qkv_bias is None
        and block.shared_gate_up is None
        and block.post_attention_norm is None
        and decoder.norms_of_heads(block) == 1
        and block.has_rope
        and block.window is None
        for block in decoder.blocks
    )
    return has_form and decoder.width % FEWEST_ROWS == 0 and decoder.expert_width % FEWEST_ROWS == 0


class GraphedDecode(DecodeEngine):
    """A `DecodeEngine` whose steps are CUDA graphs; the graphs' addresses stay valid as long as the engine exists.

    Args:
        graphs: shared with the other stages' engines; None makes its own.
        fewest_together: from so many requests on a step reads weights once for all, where its widths allow that;
            None takes the number that was the faster one on this card.

    Raises:
        ConfigurationError: `graphed_decode_unsupported_reason` has something against the decoder, or Triton is not
            installed.
    """

    def __init__(
        self, decoder: DecoderWeights, graphs: CudaGraphPool | None = None, fewest_together: int | None = None
    ) -> None:
        reason = graphed_decode_unsupported_reason(decoder)
        if reason is not None:
            raise ConfigurationError(f"the decode step cannot be captured: {reason}")
        self._decoder = decoder
        self._kernels, self._batched = _decode_step_modules()
        self._graphs = CudaGraphPool() if graphs is None else graphs
        self._kv_caches: dict[int, KVCache] = {}
        self._buffers: dict[tuple[int, int], Any] = {}
        fewest = tuning_at(decoder.device).fewest_together if fewest_together is None else fewest_together
        self._fewest_together = fewest if can_share_weights(decoder) else None
        self._stepped: tuple[int, int] | None = None
        self._use_pdl = Card.of(decoder.device).is_hopper

    def warm_up(self, knobs: EngineKnobs, kv_cache: KVCache) -> None:
        """See `DecodeEngine.warm_up`.

        Raises:
            ConfigurationError: Triton cannot build the kernels here, or the KV cache is too small to try them.
        """
        self._capture_graphs(knobs, kv_cache)

    @torch.inference_mode()
    def step(self, knobs: EngineKnobs, kv_cache: KVCache) -> torch.Tensor:
        """The step is captured first where `warm_up` did not."""
        name = self._capture_graphs(knobs, kv_cache)
        self._stepped = kv_cache.batch, kv_cache.max_seq_len
        return self._graphs.replay(name)

    def forget_experts(self) -> None:
        self._stepped = None
        for buffers in self._buffers.values():
            buffers.used.forget()

    @property
    def topk_expert_ids(self) -> Mapping[int, torch.Tensor]:
        if self._stepped is None:
            return {}
        found: Mapping[int, torch.Tensor] = self._buffers[self._stepped].used.of_tokens(self._stepped[0])
        return found

    @torch.inference_mode()
    def _capture_graphs(self, knobs: EngineKnobs, kv_cache: KVCache) -> Hashable:
        name = ("decode", id(kv_cache), knobs)
        if name in self._graphs:
            return name
        if kv_cache.max_seq_len < WARM_UPS:
            raise ConfigurationError(
                f"a captured decode step needs {WARM_UPS} slots at least, not {kv_cache.max_seq_len}"
            )
        self._kv_caches[id(kv_cache)] = kv_cache
        step = self._new_step(knobs, kv_cache)
        building = built("the decode step's kernels", ConfigurationError)
        device = self._decoder.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device, _restored_afterwards(kv_cache), building:
            self._graphs.capture(name, partial(step.launch, knobs))
        return name

    def _new_step(self, knobs: EngineKnobs, kv_cache: KVCache) -> Any:
        decoder, size = self._decoder, (kv_cache.batch, kv_cache.max_seq_len)
        if self._fewest_together is not None and kv_cache.batch >= self._fewest_together:
            kind, buffers = self._batched.BatchedStep, self._batched.BatchBuffers
            tiles: Any = batch_tiles_for(decoder, knobs.top_k, kv_cache.max_seq_len, kv_cache.batch)
        else:
            kind, buffers = self._kernels.DecodeStep, self._kernels.StepBuffers
            tiles = tiles_for(decoder, knobs.top_k, kv_cache.max_seq_len)
        if size not in self._buffers:
            self._buffers[size] = buffers.allocate(decoder, *size, tiles)
        return kind(decoder, kv_cache, self._buffers[size], tiles, self._use_pdl)


def _decode_step_modules() -> tuple[Any, Any]:
    """The modules of a step that serves each request separately, and of one that reads weights once for all."""
    try:
        from experiment_core_utils.engines.gpu.triton import batched_decode_forward as batched_step
        from experiment_core_utils.engines.gpu.triton import decode_forward as decode_step
    except ImportError as error:
        raise ConfigurationError(f"the decode step's kernels need Triton: {error}") from error
    return decode_step, batched_step


@contextmanager
def _restored_afterwards(kv_cache: KVCache) -> Iterator[None]:
    """A context in which the last positions may be written to; they, the lengths and the tokens are restored
    afterwards.
    """
    first = kv_cache.max_seq_len - WARM_UPS
    changed = (
        kv_cache.device_lengths,
        kv_cache.next_tokens,
        kv_cache.checked_tokens,
        kv_cache.device_rotary_offsets,
        kv_cache.keys[:, :, :, first:],
        kv_cache.values[:, :, :, first:],
    )
    before = [tensor.clone() for tensor in changed]
    kv_cache.device_lengths.fill_(first)
    kv_cache.next_tokens.zero_()
    # That of the last request may lead behind the last position.
    kv_cache.device_rotary_offsets.zero_()
    try:
        yield
    finally:
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(old)
