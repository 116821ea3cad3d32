"""A fused decoder block over a prompt, by compiled float32 kernels on the CPU."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experiment_core_utils.models.molmoe.engines.cpu.build import built
from experiment_core_utils.models.molmoe.engines.cpu.panels import (
    Panels,
    ProductPlace,
    Workspace,
    paired_panels,
    panels_of,
)
from experiment_core_utils.models.molmoe.engines.weights import BlockWeights

_PLACE, _WHOLE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class _Heads(ctypes.Structure):
    _fields_ = (("queries", _WHOLE), ("shared", _WHOLE), ("width", _WHOLE), ("slots", _WHOLE))


class _Experts(ctypes.Structure):
    _fields_ = (("gate_up", _PLACE), ("down", _PLACE), ("count", _WHOLE), ("width", _WHOLE), ("inner", _WHOLE))


@cache
def _library() -> Any:
    library: Any = built("decoder_block.cpp")
    library.decoder_project.argtypes = [*[_PLACE] * 2, ProductPlace, *[_PLACE] * 7, _Heads, _WHOLE, _FLOAT, _INT]
    library.decoder_route.argtypes = [
        *[*[_PLACE] * 2, ProductPlace, _PLACE, ProductPlace],
        *[*[_PLACE] * 4, _WHOLE, _INT, _WHOLE, _FLOAT, _INT],
    ]
    library.decoder_mix.argtypes = [*[_PLACE] * 3, _Experts, *[_PLACE] * 4, *[_WHOLE] * 2, _INT]
    library.decoder_project.restype = library.decoder_route.restype = library.decoder_mix.restype = None
    return library


@dataclass(frozen=True)
class DecoderBlockKernel:
    """A block without its attention: H wide, E experts of width I. See `BlockWeights`.

    Attributes:
        block: norms, and the sizes.
        joint: products of queries, keys and values as one.
        gate_up: [E, P, H, tile], half of a panel gates, half their ups.
        down: panels of all experts' [H, I], one expert behind the other.
        eps: of the norms.
        normalises: whether the chosen experts' weights are made to sum to 1.
        memory: that calls work in; may be shared with other blocks.
    """

    block: BlockWeights
    joint: Panels
    output: Panels
    router: Panels
    gate_up: torch.Tensor
    down: torch.Tensor
    eps: float
    normalises: bool
    memory: Workspace

    def reserve(self, tokens: int, top_k: int, heads: int, head_width: int) -> None:
        """Take the memory that calls for so many tokens work in."""
        self._workspace(tokens, top_k)
        self.memory.buffer("queries", heads, tokens, head_width)

    def _workspace(self, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Buffers for normed states, weights of experts and what the experts make."""
        buffer, width = self.memory.buffer, self.output.columns
        return buffer("normed", tokens, width), buffer("weights", tokens, top_k), buffer("mixed", tokens * top_k, width)

    def project(
        self,
        states: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kept: tuple[torch.Tensor, torch.Tensor],
        heads: int,
    ) -> torch.Tensor:
        """States [T, H] -> queries [Q, T, D], valid until the next call; keys and values into `kept`.

        Queries and keys are normed and turned.

        Args:
            cos_sin: cosines and signed sines [T, 1, D], as of `RotaryTable`.
            kept: [KV, T, D] each, parts of a store in which the slots of a head are neighbours.
            heads: Q.

        Raises:
            ValueError: a tensor has another shape, dtype or layout; nothing was written.
        """
        keys, values = kept
        shared, tokens, width = keys.shape
        _refuse_others("states", states, tokens, self.joint.weights.shape[1])
        for name, turn in zip(("cosines", "sines"), cos_sin, strict=True):
            _refuse_others(name, turn, tokens, 1, width)
        if (heads + 2 * shared) * width != self.joint.columns:
            raise ValueError(f"{heads} and {shared} heads of {width} are not those of the block")
        if values.shape != keys.shape or keys.stride() != values.stride() or keys.stride()[1:] != (width, 1):
            raise ValueError("the positions of a head must be contiguous, in KV caches of the same length")
        if any(each.dtype != torch.float32 or each.stride(0) % width for each in kept):
            raise ValueError("keys and values must be float32 in whole positions")
        queries = self.memory.buffer("queries", heads, tokens, width)
        norms = self.block.query_norm, self.block.key_norm
        _library().decoder_project(
            *(states.data_ptr(), self.block.input_norm.data_ptr(), self.joint.place),
            *(each.data_ptr() for each in (*norms, *cos_sin, queries, *kept)),
            *(_Heads(heads, shared, width, keys.stride(0) // width), tokens, self.eps, torch.get_num_threads()),
        )
        return queries

    def finish(self, states: torch.Tensor, attended: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States [T, H] and attended [T, Q * D] -> states behind the block, and experts [T, k] from the heaviest on."""
        tokens, width = states.shape
        _refuse_others("states", states, tokens, self.output.columns)
        _refuse_others("attended rows", attended, tokens, self.output.weights.shape[1])
        if not 0 < top_k <= self.router.columns:
            raise ValueError(f"{top_k} experts a token were requested, of {self.router.columns}")
        (normed, weights, mixed), threads = self._workspace(tokens, top_k), torch.get_num_threads()
        summed, topk_ids = torch.empty_like(states), torch.empty(tokens, top_k, dtype=torch.int64)
        order, ends = (
            torch.empty(tokens * top_k, dtype=torch.int64),
            torch.empty(self.router.columns, dtype=torch.int64),
        )
        _library().decoder_route(
            *(states.data_ptr(), attended.data_ptr(), self.output.place, self.block.ffn_norm.data_ptr()),
            *(self.router.place, *(each.data_ptr() for each in (summed, normed, weights, topk_ids))),
            *(top_k, int(self.normalises), tokens, self.eps, threads),
        )
        experts = _Experts(
            self.gate_up.data_ptr(), self.down.data_ptr(), self.router.columns, width, self.block.down.shape[2]
        )
        _library().decoder_mix(
            *(each.data_ptr() for each in (normed, weights, topk_ids)),
            *(experts, *(each.data_ptr() for each in (summed, order, ends, mixed)), tokens, top_k, threads),
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


def _refuse_others(name: str, given: torch.Tensor, *size: int) -> None:
    if given.shape != size or given.dtype != torch.float32 or not given.is_contiguous():
        raise ValueError(f"{name} have to be contiguous float32 {list(size)}, not {given.dtype} {list(given.shape)}")
