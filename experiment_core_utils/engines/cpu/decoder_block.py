"""A fused decoder block over a prompt, by compiled float32 kernels on the CPU."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.cpu.build import (
    FLOAT,
    INT,
    INT64,
    POINTER,
    HeadNorm,
    built,
    declared,
    fields,
    pointers,
    refuse_others,
)
from experiment_core_utils.engines.cpu.panels import Workspace
from experiment_core_utils.engines.weights import BlockWeights
from experiment_core_utils.primitives.errors import ConfigurationError


class _Heads(ctypes.Structure):
    _fields_ = (
        *fields(HeadNorm, "query_norm", "key_norm"),
        *fields(INT64, "queries", "shared", "width", "slots"),
    )


class _Norms(ctypes.Structure):
    _fields_ = fields(POINTER, "post_attention", "ffn")


class _Matrix(ctypes.Structure):
    _fields_ = (*fields(POINTER, "weights"), *fields(INT64, "columns", "inner"))

    @classmethod
    def of(cls, weights: torch.Tensor) -> "_Matrix":
        """Of [N, K]; for a call, valid as long as the weights live."""
        return cls(weights.data_ptr(), *weights.shape)


class _Experts(ctypes.Structure):
    _fields_ = (*fields(POINTER, "gate_up", "down"), *fields(INT64, "count", "width", "inner"))


@cache
def _library() -> Any:
    return declared(
        built("decoder_block.cpp"),
        decoder_project=[*[POINTER] * 2, _Matrix, POINTER, _Heads, *[POINTER] * 5, INT64, FLOAT, INT],
        decoder_route=[*[POINTER] * 2, _Matrix, _Norms, POINTER, INT64, *[POINTER] * 4, INT64, INT, INT64, FLOAT, INT],
        decoder_mix=[*[POINTER] * 3, _Experts, *[POINTER] * 5, *[INT64] * 2, FLOAT, INT],
    )


@dataclass(frozen=True)
class DecoderBlockKernel:
    """A fused block without its attention, H wide; its weights are read where they lie.

    Raises:
        ConfigurationError: the kernels cannot be compiled here, or a shared expert's sum is to be normed.
    """

    block: BlockWeights
    eps: float  #: of the norms
    normalises: bool  #: whether the chosen experts' weights are made to sum to 1
    memory: Workspace  #: that calls work in; may be shared with other blocks

    def __post_init__(self) -> None:
        _library()
        if self.block.shared_down is not None and self.block.post_ffn_norm is not None:
            raise ConfigurationError("the kernels of a prompt take no shared expert with a norm behind the experts")

    def reserve(self, tokens: int, top_k: int, heads: int, head_width: int) -> None:
        """Allocate the workspace of calls for so many tokens."""
        self._workspace(tokens, top_k)
        self._mixed(tokens, top_k)
        self.memory.buffer("queries", heads, tokens, head_width)

    def _workspace(self, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for normed states and weights of experts."""
        width = len(self.block.output)
        return self.memory.buffer("normed", tokens, width), self.memory.buffer("weights", tokens, top_k)

    def _mixed(self, tokens: int, top_k: int) -> torch.Tensor:
        """A buffer for the experts' products."""
        return self.memory.buffer("mixed", tokens * top_k, len(self.block.output))

    def project(
        self,
        states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kept: tuple[torch.Tensor, torch.Tensor],
        heads: int,
    ) -> torch.Tensor:
        """Queries [Q, T, D] of states [T, H], valid until the next call; keys and values go into `kept`.

        Queries and keys are normed and turned as far as the block does so.

        Args:
            cos_sin: cosines and signed sines [T, 1, D], as of `RotaryTable`.
            kept: [KV, T, D] each, parts of a KV cache in which the positions of a head are neighbours.
            heads: Q, or 0 for keys and values alone.

        Raises:
            ValueError: a tensor has another shape, dtype or layout; nothing was written.
        """
        keys, values = kept
        shared, tokens, width = keys.shape
        refuse_others("states", states, tokens, self.block.qkv.shape[1])
        for name, turn in zip(("cosines", "sines"), cos_sin, strict=True):
            refuse_others(name, turn, tokens, 1, width)
        qkv, bias = self.block.qkv, self.block.qkv_bias
        # Rows of queries that are left out.
        before = len(qkv) - (heads + 2 * shared) * width
        if before and (heads or before < 0):
            raise ValueError(f"{heads} and {shared} heads of {width} are not those of the block")
        if values.shape != keys.shape or keys.stride() != values.stride() or keys.stride()[1:] != (width, 1):
            raise ValueError("the positions of a head must be contiguous, in KV caches of the same length")
        if any(each.dtype != torch.float32 or each.stride(0) % width for each in kept):
            raise ValueError("keys and values must be float32 in whole positions")
        queries = self.memory.buffer("queries", heads, tokens, width)
        norms = HeadNorm.of(self.block.query_norm), HeadNorm.of(self.block.key_norm)
        rotary = cos_sin if self.block.has_rope else (None, None)
        _library().decoder_project(
            *(*pointers(states, self.block.input_norm), _Matrix.of(qkv[before:])),
            *pointers(None if bias is None else bias[before:]),
            *(_Heads(*norms, heads, shared, width, keys.stride(0) // width), *pointers(*rotary, queries, *kept)),
            *(tokens, self.eps, torch.get_num_threads()),
        )
        return queries

    def finish(self, states: torch.Tensor, attended: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States after the block, from states [T, H] and attended [T, Q * D], and experts [T, k] from the
        heaviest on.
        """
        block, tokens, experts = self.block, len(states), self.block.num_experts
        refuse_others("states", states, tokens, len(block.output))
        refuse_others("attended rows", attended, tokens, block.output.shape[1])
        if not 0 < top_k <= experts:
            raise ValueError(f"{top_k} experts a token were requested, of {experts}")
        normed, weights = self._workspace(tokens, top_k)
        summed, topk_ids = torch.empty_like(states), torch.empty(tokens, top_k, dtype=torch.int64)
        _library().decoder_route(
            *(*pointers(states, attended), _Matrix.of(block.output)),
            *(_Norms(*pointers(block.post_attention_norm, block.ffn_norm)), *pointers(block.router), experts),
            *pointers(summed, normed, weights, topk_ids),
            *(top_k, int(self.normalises), tokens, self.eps, torch.get_num_threads()),
        )
        self._mix(block.gate_up, block.down, normed, weights, topk_ids, block.post_ffn_norm, summed)
        if block.shared_gate_up is not None and block.shared_down is not None:
            if block.shared_gate is None:
                weights = torch.ones(tokens, 1)
            else:
                weights = F.linear(normed, block.shared_gate).sigmoid_()
            only = torch.zeros(tokens, 1, dtype=torch.int64)
            self._mix(block.shared_gate_up, block.shared_down, normed, weights, only, None, summed)
        return summed, topk_ids

    def _mix(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        normed: torch.Tensor,
        weights: torch.Tensor,
        topk_ids: torch.Tensor,
        norm: torch.Tensor | None,
        states: torch.Tensor,
    ) -> None:
        """Add the weighted sums of the experts of normed [T, H] to states [T, H]; gate_up [., H], down [., I]."""
        (tokens, top_k), (width, inner) = topk_ids.shape, down.shape[-2:]
        experts = _Experts(*pointers(gate_up, down), down.numel() // (width * inner), width, inner)
        mixed, order = self._mixed(tokens, top_k), torch.empty(tokens * top_k, dtype=torch.int64)
        ends = torch.empty(experts.count, dtype=torch.int64)
        _library().decoder_mix(
            *(*pointers(normed, weights, topk_ids), experts, *pointers(norm, states, order, ends, mixed)),
            *(tokens, top_k, self.eps, torch.get_num_threads()),
        )
