"""The cpu engines of a vision tower's blocks, and of a tower with its connector, in float32 with compiled kernels.

Unlike in `ReferenceVision`, embedding, blocks and pooling are compiled kernels, and intermediate states stay in memory
that is kept between requests.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiment_core_utils.engines.cpu.attention import cpu_attention
from experiment_core_utils.engines.cpu.panels import Workspace, refuse_other_places
from experiment_core_utils.engines.cpu.vision_block import (
    VisionBlockKernel,
    embedding_kernel,
    pooling_kernel,
)
from experiment_core_utils.engines.reference.vision import ReferenceVision, padding_crops
from experiment_core_utils.engines.weights import VisionBlockWeights, VisionModules


class CpuVisionBlocks:
    """The blocks of a tower, whatever is before and after them.

    Raises:
        ConfigurationError: they are not in float32 on the CPU, or the kernels cannot be compiled for them here.
    """

    def __init__(self, blocks: Sequence[VisionBlockWeights], num_heads: int) -> None:
        joint = blocks[0].qkv
        refuse_other_places(joint.device, joint.dtype)
        self.attention = cpu_attention(joint.shape[1] // num_heads)
        self.kernels = [VisionBlockKernel(block) for block in blocks]
        self.memory = Workspace()
        self._num_heads = num_heads

    def advance(self, index: int, states: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """States [K, T, C] through a block, where they lie.

        Args:
            mask: of patches that hide others, as torch's attention takes it for [K, N, T, T]; that attention runs then.
        """
        rows, kernel = states.flatten(0, 1), self.kernels[index]
        joint = kernel.project(rows, self.memory.buffer("joint", len(rows), 3 * kernel.width))
        queries, keys, values = joint.view(*states.shape[:2], 3, self._num_heads, -1).permute(2, 0, 3, 1, 4)
        if mask is None:
            attended = self.attention(queries, keys, values, False)
        else:
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2).flatten(2)
        kernel.finish(attended.flatten(0, 1), rows)


class CpuVision(ReferenceVision):
    """A `VisionEngine`.

    Raises:
        ConfigurationError: the tower is not in float32 on the CPU, or the kernels cannot be compiled for it here.
    """

    def __init__(self, tower: VisionModules) -> None:
        super().__init__(tower)
        self.blocks = CpuVisionBlocks(self._blocks, self._heads)
        self._embedding = embedding_kernel(self._tower.embeddings, self._tower.pre_layernorm)
        self._pooling = pooling_kernel(self._connector)

    def _patch_states(self, pixel_values: torch.Tensor) -> torch.Tensor:
        tower, states = self._tower, self._embedding.states(pixel_values.contiguous())
        crops, tokens, width = states.shape
        features = self.blocks.memory.buffer("features", crops, tokens - 1, width * len(tower.feature_blocks))
        for index in range(len(self._blocks)):
            self.blocks.advance(index, states)
            for place, wanted in enumerate(tower.feature_blocks):
                if wanted == index:
                    features[:, :, place * width : (place + 1) * width] = states[:, 1:]
        for crop in padding_crops(pixel_values, tower.pad_value):
            features[crop] = 0
        return features

    def _connected(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        attended = self._pooling.pooled(features, image_masks.float().contiguous())
        projected: torch.Tensor = self._connector.project_attended(attended)
        return projected
