"""The cpu engines of MolmoE's vision tower and connector, in float32 with compiled kernels.

They differ from `ReferenceVision` in the tower's blocks: attention and the quick GELU are compiled kernels, residual
sums are computed inside the matrix products, and intermediate states stay in memory that is kept between requests.
"""

from abc import ABC, abstractmethod

import torch

from experiment_core_utils.models.molmoe.engines.cpu.attention import cpu_attention
from experiment_core_utils.models.molmoe.engines.cpu.panels import Workspace
from experiment_core_utils.models.molmoe.engines.cpu.row_ops import refuse_other_places, row_kernels
from experiment_core_utils.models.molmoe.engines.cpu.vision_block import (
    VisionBlockKernel,
    embedding_kernel,
    pooling_kernel,
    vision_block_kernel,
)
from experiment_core_utils.models.molmoe.engines.reference.vision import ReferenceVision, padding_crops
from experiment_core_utils.models.molmoe.engines.weights import LayerNorm, VisionBlockWeights
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration


class KernelVision(ReferenceVision, ABC):
    """A `VisionEngine` whose attention is a compiled kernel; what is between two attentions is for others to say.

    Raises:
        ConfigurationError: as of `ReferenceVision`; the model is not in float32 on the CPU; or the kernels cannot be
            compiled for it here.
    """

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        super().__init__(model)
        refuse_other_places(model.device, model.dtype)
        self._attention = cpu_attention(model.config.vision_config.hidden_size // self._heads)
        self._memory = Workspace()

    def _patch_states(self, pixel_values: torch.Tensor) -> torch.Tensor:
        tower, states = self._tower, self._embedded(pixel_values)
        crops, tokens, width = states.shape
        features = self._memory.buffer("features", crops, tokens - 1, width * len(tower.feature_blocks))
        for index, block in enumerate(self._blocks):
            self._advance(block, states)
            for place, wanted in enumerate(tower.feature_blocks):
                if wanted == index:
                    features[:, :, place * width : (place + 1) * width] = states[:, 1:]
        for crop in padding_crops(pixel_values):
            features[crop] = 0
        return features

    def _embedded(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[K, 3, S, S] -> states [K, T, C] in front of the blocks, which they may overwrite."""
        embedded: torch.Tensor = self._tower.pre_layernorm(self._tower.embeddings(pixel_values))
        return embedded

    @abstractmethod
    def _advance(self, block: VisionBlockWeights, states: torch.Tensor) -> None:
        """[K, T, C] through a block, where they lie."""


class CpuVision(KernelVision):
    """A `VisionEngine`; products and norms are torch's own.

    Raises:
        ConfigurationError: as of `KernelVision`.
    """

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        super().__init__(model)
        self._kernels = row_kernels()

    def _advance(self, block: VisionBlockWeights, states: torch.Tensor) -> None:
        rows = states.flatten(0, 1)
        joint = self._memory.buffer("joint", len(rows), len(block.qkv))
        torch.addmm(block.qkv_bias, block.first_norm.applied(rows), block.qkv.t(), out=joint)
        queries, keys, values = joint.view(*states.shape[:2], 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        attended = self._attention(queries, keys, values, False).flatten(0, 1)
        rows.add_(block.output_bias).addmm_(attended, block.output.t())
        hidden = self._memory.buffer("hidden", len(rows), len(block.inner_bias))
        torch.mm(block.second_norm.applied(rows), block.inner.t(), out=hidden)
        self._kernels.quick_gelu(hidden, block.inner_bias)
        rows.add_(block.outer_bias).addmm_(hidden, block.outer.t())


class CpuFusedVision(KernelVision):
    """A `VisionEngine`.

    Raises:
        ConfigurationError: as of `KernelVision`.
    """

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        super().__init__(model)
        self._fused: dict[int, VisionBlockKernel] = {id(block): vision_block_kernel(block) for block in self._blocks}
        self._embedding = embedding_kernel(self._tower.embeddings, LayerNorm.of(self._tower.pre_layernorm))
        self._pooling = pooling_kernel(self._connector)

    def _embedded(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self._embedding.states(pixel_values.contiguous())

    def _connected(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        attended = self._pooling.pooled(features, image_masks.float().contiguous())
        projected: torch.Tensor = self._connector.project_attended(attended)
        return projected

    def _advance(self, block: VisionBlockWeights, states: torch.Tensor) -> None:
        kernel, rows = self._fused[id(block)], states.flatten(0, 1)
        joint = kernel.project(rows, self._memory.buffer("joint", len(rows), len(block.qkv)))
        queries, keys, values = joint.view(*states.shape[:2], 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        kernel.finish(self._attention(queries, keys, values, False).flatten(0, 1), rows)
