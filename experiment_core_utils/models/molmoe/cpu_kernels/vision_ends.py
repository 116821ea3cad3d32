"""In: crops or patch features in float32 on the CPU; out: a tower's first states, or pooled windows, compiled."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.molmoe.cpu_kernels.building import built
from experiment_core_utils.models.molmoe.cpu_kernels.products import Panels, ProductPlace, panels_of
from experiment_core_utils.models.molmoe.cpu_kernels.vision_block import (
    _INT,
    _PLACE,
    _WHOLE,
    NormPlace,
    refuse_other_rows,
    tile_width,
)


class _Crops(ctypes.Structure):
    _fields_ = tuple((name, _WHOLE) for name in ("count", "channels", "side", "patch"))


class _Windows(ctypes.Structure):
    _fields_ = tuple((name, _WHOLE) for name in ("crops", "cells", "side", "heads"))


@cache
def _ends_library() -> Any:
    library: Any = built("vision_ends.cpp")
    library.vision_embed.argtypes = [_PLACE, ProductPlace, *[_PLACE] * 2, NormPlace, _PLACE, _Crops, _INT]
    library.vision_pool.argtypes = [*[_PLACE] * 3, ProductPlace, ProductPlace, _PLACE, _Windows, _INT]
    library.vision_embed.restype = library.vision_pool.restype = None
    return library


@dataclass(frozen=True)
class EmbeddingKernel:
    """Patches to states, W wide.

    Attributes:
        patches: the product [W, channels * S * S], S the side of a patch.
        patch_side: S.
        class_token: [W].
        positions: [P + 1, W], the class token's first.
        norm: of the sums.
    """

    patches: Panels
    patch_side: int
    class_token: torch.Tensor
    positions: torch.Tensor
    norm: nn.LayerNorm

    def states(self, pixels: torch.Tensor) -> torch.Tensor:
        """Crops [K, channels, side, side] -> [K, P + 1, W].

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
            *(pixels.data_ptr(), self.patches.place, self.class_token.data_ptr(), self.positions.data_ptr()),
            *(NormPlace.of(self.norm), states.data_ptr()),
            *(_Crops(crops, channels, side, self.patch_side), torch.get_num_threads()),
        )
        return states


def embedding_kernel(embeddings: Any, norm: nn.LayerNorm) -> EmbeddingKernel:
    """Kernel of CLIP's embeddings and the norm after them.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    _ends_library()
    weight = embeddings.patch_embedding.weight.detach()
    patches = panels_of(weight.flatten(1), None, tile_width())
    class_token, positions = embeddings.class_embedding.detach(), embeddings.position_embedding.weight.detach()
    return EmbeddingKernel(patches, weight.shape[2], class_token, positions, norm)


@dataclass(frozen=True)
class PoolingKernel:
    """Windows of patches to one row each, by attention of `heads` heads; the query is of their mean.

    Attributes:
        pads: [2, C], added to patches that are padding: all, partly.
        query: [W, C].
        key_value: [2 * W, C], rows: keys, values.
        cells: windows along a side of a crop.
        side: patches along a side of a window.
    """

    pads: torch.Tensor
    query: Panels
    key_value: Panels
    heads: int
    cells: int
    side: int

    def pooled(self, features: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """[K, P, C] and masks [K, P], 0 where a patch is all padding, below 1 where partly -> [K, cells * cells, W].

        Raises:
            ValueError: features or masks have another shape, dtype or layout.
        """
        crops, width = len(features), self.query.columns
        inner, patches = self.query.weights.shape[1], (self.cells * self.side) ** 2
        refuse_other_rows(features, crops, patches, inner)
        refuse_other_rows(masks, crops, patches)
        attended = torch.empty(crops, self.cells**2, width)
        windows = _Windows(crops, self.cells, self.side, self.heads)
        _ends_library().vision_pool(
            *(each.data_ptr() for each in (features, masks, self.pads)),
            *(self.query.place, self.key_value.place, attended.data_ptr(), windows, torch.get_num_threads()),
        )
        return attended


def pooling_kernel(connector: Any) -> PoolingKernel:
    """Kernel of a `MolmoeConnector`.

    Raises:
        ConfigurationError: the kernels cannot be compiled here.
    """
    _ends_library()
    layers, tile = (connector.q_proj, connector.k_proj, connector.v_proj), tile_width()
    query, key, value = ((layer.weight.detach(), layer.bias.detach()) for layer in layers)
    key_value = panels_of(torch.cat([key[0], value[0]]), torch.cat([key[1], value[1]]), tile)
    cells = connector.grid_side // connector.window
    pads, heads = connector.pad_embed.detach(), connector.num_heads
    return PoolingKernel(pads, panels_of(*query, tile), key_value, heads, cells, connector.window)
