"""A fused decoder block over a prompt, by compiled float32 kernels on the CPU."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experiment_core_utils.engines.cpu.build import (
    FLOAT,
    INT,
    INT64,
    POINTER,
    built,
    declared,
    fields,
    pointers,
    refuse_others,
)
from experiment_core_utils.engines.cpu.panels import (
    Panels,
    ProductPlace,
    Workspace,
    paired_panels,
    panels_of,
)
from experiment_core_utils.engines.weights import BlockWeights


class _Heads(ctypes.Structure):
    _fields_ = fields(INT64, "queries", "shared", "width", "slots")


class _Experts(ctypes.Structure):
    _fields_ = (*fields(POINTER, "gate_up", "down"), *fields(INT64, "count", "width", "inner"))


@cache
def _library() -> Any:
    products = [*[POINTER] * 2, ProductPlace, POINTER, ProductPlace]
    return declared(
        built("decoder_block.cpp"),
        decoder_project=[*[POINTER] * 2, ProductPlace, *[POINTER] * 7, _Heads, INT64, FLOAT, INT],
        decoder_route=[*products, *[POINTER] * 4, INT64, INT, INT64, FLOAT, INT],
        decoder_mix=[*[POINTER] * 3, _Experts, *[POINTER] * 4, *[INT64] * 2, INT],
    )


@dataclass(frozen=True)
class DecoderBlockKernel:
    """A fused block without its attention: H wide, E experts of width I. See `BlockWeights`."""

    block: BlockWeights  #: norms, and the sizes
    joint: Panels  #: products of queries, keys and values as one
    output: Panels
    router: Panels
    gate_up: torch.Tensor  #: [E, P, H, tile], half of a panel gates, half their ups
    down: torch.Tensor  #: panels of all experts' [H, I], one expert after the other
    eps: float  #: of the norms
    normalises: bool  #: whether the chosen experts' weights are made to sum to 1
    memory: Workspace  #: that calls work in; may be shared with other blocks

    def reserve(self, tokens: int, top_k: int, heads: int, head_width: int) -> None:
        """Allocate the workspace of calls for so many tokens."""
        self._workspace(tokens, top_k)
        self.memory.buffer("queries", heads, tokens, head_width)

    def _workspace(self, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Buffers for normed states, weights of experts and the experts' products."""
        buffer, width = self.memory.buffer, self.output.columns
        return buffer("normed", tokens, width), buffer("weights", tokens, top_k), buffer("mixed", tokens * top_k, width)

    def project(
        self,
        states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kept: tuple[torch.Tensor, torch.Tensor],
        heads: int,
    ) -> torch.Tensor:
        """Queries [Q, T, D] of states [T, H], valid until the next call; keys and values go into `kept`.

        Queries and keys are normed and turned.

        Args:
            cos_sin: cosines and signed sines [T, 1, D], as of `RotaryTable`.
            kept: [KV, T, D] each, parts of a KV cache in which the positions of a head are neighbours.
            heads: Q.

        Raises:
            ValueError: a tensor has another shape, dtype or layout; nothing was written.
        """
        keys, values = kept
        shared, tokens, width = keys.shape
        refuse_others("states", states, tokens, self.joint.weights.shape[1])
        for name, turn in zip(("cosines", "sines"), cos_sin, strict=True):
            refuse_others(name, turn, tokens, 1, width)
        if (heads + 2 * shared) * width != self.joint.columns:
            raise ValueError(f"{heads} and {shared} heads of {width} are not those of the block")
        if values.shape != keys.shape or keys.stride() != values.stride() or keys.stride()[1:] != (width, 1):
            raise ValueError("the positions of a head must be contiguous, in KV caches of the same length")
        if any(each.dtype != torch.float32 or each.stride(0) % width for each in kept):
            raise ValueError("keys and values must be float32 in whole positions")
        queries = self.memory.buffer("queries", heads, tokens, width)
        norms = self.block.query_norm, self.block.key_norm
        _library().decoder_project(
            *(*pointers(states, self.block.input_norm), self.joint.place),
            *pointers(*norms, *cos_sin, queries, *kept),
            *(_Heads(heads, shared, width, keys.stride(0) // width), tokens, self.eps, torch.get_num_threads()),
        )
        return queries

    def finish(self, states: torch.Tensor, attended: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States after the block, from states [T, H] and attended [T, Q * D], and experts [T, k] from the
        heaviest on.
        """
        tokens, width = states.shape
        refuse_others("states", states, tokens, self.output.columns)
        refuse_others("attended rows", attended, tokens, self.output.weights.shape[1])
        if not 0 < top_k <= self.router.columns:
            raise ValueError(f"{top_k} experts a token were requested, of {self.router.columns}")
        (normed, weights, mixed), threads = self._workspace(tokens, top_k), torch.get_num_threads()
        summed, topk_ids = torch.empty_like(states), torch.empty(tokens, top_k, dtype=torch.int64)
        order, ends = (
            torch.empty(tokens * top_k, dtype=torch.int64),
            torch.empty(self.router.columns, dtype=torch.int64),
        )
        _library().decoder_route(
            *(*pointers(states, attended), self.output.place, *pointers(self.block.ffn_norm)),
            *(self.router.place, *pointers(summed, normed, weights, topk_ids)),
            *(top_k, int(self.normalises), tokens, self.eps, threads),
        )
        panels = pointers(self.gate_up, self.down)
        experts = _Experts(*panels, self.router.columns, width, self.block.down.shape[2])
        _library().decoder_mix(
            *pointers(normed, weights, topk_ids),
            *(experts, *pointers(summed, order, ends, mixed), tokens, top_k, threads),
        )
        return summed, topk_ids


def decoder_block_kernel(block: BlockWeights, eps: float, normalises: bool, memory: Workspace) -> DecoderBlockKernel:
    """A block kernel with copies of the block's weights in panels.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    tile = int(_library().tile_width())
    down = torch.cat([panels_of(each, None, tile).weights for each in block.down])
    joint, output, router = (panels_of(each, None, tile) for each in (block.qkv, block.output, block.router))
    gate_up = paired_panels(block.gate_up, tile)
    return DecoderBlockKernel(block, joint, output, router, gate_up, down, eps, normalises, memory)
