"""A fused block of a vision tower: its products and norms in two compiled float32 calls on the CPU."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
from torch import nn

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
from experiment_core_utils.engines.cpu.panels import Panels, ProductPlace, panels_of
from experiment_core_utils.engines.weights import VisionActivation, VisionBlockWeights
from experiment_core_utils.primitives.errors import ConfigurationError

ACTIVATIONS = get_args(VisionActivation)


class NormPlace(ctypes.Structure):
    """The struct `Norm` of rows.h."""

    _fields_ = (*fields(POINTER, "weights", "bias"), *fields(FLOAT, "eps"))

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> "NormPlace":
        """For a call; valid as long as the norm lives."""
        return cls(*pointers(norm.weight, norm.bias), norm.eps)


class _Layer(ctypes.Structure):
    _fields_ = (*fields(POINTER, "weights", "bias"), *fields(INT64, "columns", "inner"))

    @classmethod
    def of(cls, weights: torch.Tensor, bias: torch.Tensor) -> "_Layer":
        """Of [N, K] and [N]; for a call, valid as long as the tensors live."""
        return cls(*pointers(weights, bias), *weights.shape)


@cache
def _library() -> Any:
    return declared(
        built("vision_block.cpp"),
        vision_project=[POINTER, NormPlace, _Layer, POINTER, INT64, INT],
        vision_finish=[*[POINTER] * 2, _Layer, NormPlace, *[_Layer] * 2, INT, INT64, INT],
    )


@dataclass(frozen=True)
class VisionBlockKernel:
    """A fused block without its attention, C wide; its weights are read where they lie.

    Raises:
        ConfigurationError: the kernels cannot be compiled here, or the weights have another dtype or layout.
    """

    block: VisionBlockWeights

    def __post_init__(self) -> None:
        _library()
        for name, value in vars(self.block).items():
            if isinstance(value, torch.Tensor) and (value.dtype != torch.float32 or not value.is_contiguous()):
                raise ConfigurationError(f"the {name} weights of a vision block are not in contiguous float32")

    @property
    def width(self) -> int:
        """C."""
        return len(self.block.output)

    def project(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """States [R, C] -> out [R, 3 * C]: queries, keys and values of the normed states."""
        block, rows = self.block, len(states)
        refuse_others("states", states, rows, self.width)
        refuse_others("queries, keys and values", out, rows, len(block.qkv))
        norm, joint = NormPlace.of(block.first_norm), _Layer.of(block.qkv, block.qkv_bias)
        places, threads = pointers(states, out), torch.get_num_threads()
        _library().vision_project(places[0], norm, joint, places[1], rows, threads)
        return out

    def finish(self, attended: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Both residual sums, into states [R, C]: the output of attended [R, C], and the product through I."""
        block, rows = self.block, len(states)
        refuse_others("attended rows", attended, rows, block.output.shape[1])
        refuse_others("states", states, rows, self.width)
        _library().vision_finish(
            *(*pointers(attended, states), _Layer.of(block.output, block.output_bias), NormPlace.of(block.second_norm)),
            *(_Layer.of(block.inner, block.inner_bias), _Layer.of(block.outer, block.outer_bias)),
            *(ACTIVATIONS.index(block.activation), rows, torch.get_num_threads()),
        )
        return states


class _Crops(ctypes.Structure):
    _fields_ = fields(INT64, "count", "channels", "side", "patch")


class _Windows(ctypes.Structure):
    _fields_ = fields(INT64, "crops", "cells", "side", "heads")


@cache
def _ends_library() -> Any:
    return declared(
        built("vision_ends.cpp"),
        vision_embed=[POINTER, ProductPlace, *[POINTER] * 2, NormPlace, POINTER, _Crops, INT],
        vision_pool=[*[POINTER] * 3, *[ProductPlace] * 2, POINTER, _Windows, INT],
    )


def tile_width() -> int:
    """The number of columns of a panel.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    return int(_ends_library().tile_width())


@dataclass(frozen=True)
class EmbeddingKernel:
    """A kernel from patches to states, W wide."""

    patches: Panels  #: the product [W, channels * S * S], S the side of a patch
    patch_side: int  #: S
    class_token: torch.Tensor  #: [W]
    positions: torch.Tensor  #: [P + 1, W], the class token's first
    norm: nn.LayerNorm  #: of the sums

    def states(self, pixels: torch.Tensor) -> torch.Tensor:
        """States [K, P + 1, W] of crops [K, channels, side, side].

        Raises:
            ValueError: the crops have another shape, dtype or layout.
        """
        crops, channels, side = pixels.shape[:3]
        inner, width = self.patches.weights.shape[1], self.patches.columns
        tokens = (side // self.patch_side) ** 2 + 1
        if pixels.dtype != torch.float32 or not pixels.is_contiguous() or pixels.shape[3] != side:
            raise ValueError(f"crops have to be square, in contiguous float32, not {list(pixels.shape)}")
        if side % self.patch_side or channels * self.patch_side**2 != inner or self.positions.shape != (tokens, width):
            raise ValueError(f"crops of {side} pixels with {channels} channels are not those of this tower")
        states = torch.empty(crops, tokens, width)
        _ends_library().vision_embed(
            *(*pointers(pixels), self.patches.place, *pointers(self.class_token, self.positions)),
            *(NormPlace.of(self.norm), *pointers(states)),
            *(_Crops(crops, channels, side, self.patch_side), torch.get_num_threads()),
        )
        return states


def embedding_kernel(embeddings: Any, norm: nn.LayerNorm) -> EmbeddingKernel:
    """Kernel of CLIP's embeddings and the norm after them.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    weight = embeddings.patch_embedding.weight.detach()
    patches = panels_of(weight.flatten(1), None, tile_width())
    class_token, positions = embeddings.class_embedding.detach(), embeddings.position_embedding.weight.detach()
    return EmbeddingKernel(patches, weight.shape[2], class_token, positions, norm)


@dataclass(frozen=True)
class PoolingKernel:
    """A kernel that pools windows of patches to one row each, by attention of `heads` heads; the query is of their
    mean.
    """

    pads: torch.Tensor  #: [2, C], added to patches that are padding: all, partly
    query: Panels  #: [W, C]
    key_value: Panels  #: [2 * W, C], rows: keys, values
    heads: int
    cells: int  #: windows along a side of a crop
    side: int  #: patches along a side of a window

    def pooled(self, features: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Pooled rows [K, cells * cells, W] of [K, P, C] and masks [K, P], 0 where a patch is all padding, below 1
        where partly.

        Raises:
            ValueError: features or masks have another shape, dtype or layout.
        """
        crops, width = len(features), self.query.columns
        inner, patches = self.query.weights.shape[1], (self.cells * self.side) ** 2
        refuse_others("features", features, crops, patches, inner)
        refuse_others("masks", masks, crops, patches)
        attended = torch.empty(crops, self.cells**2, width)
        windows = _Windows(crops, self.cells, self.side, self.heads)
        _ends_library().vision_pool(
            *pointers(features, masks, self.pads),
            *(self.query.place, self.key_value.place, *pointers(attended), windows, torch.get_num_threads()),
        )
        return attended


def pooling_kernel(connector: Any) -> PoolingKernel:
    """Kernel of a connector that pools windows by attention.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    layers, tile = (connector.q_proj, connector.k_proj, connector.v_proj), tile_width()
    query, key, value = ((layer.weight.detach(), layer.bias.detach()) for layer in layers)
    key_value = panels_of(torch.cat([key[0], value[0]]), torch.cat([key[1], value[1]]), tile)
    cells = connector.grid_side // connector.window
    pads, heads = connector.pad_embed.detach(), connector.num_heads
    return PoolingKernel(pads, panels_of(*query, tile), key_value, heads, cells, connector.window)
