"""The cpu engine of a vision tower and its connector, in float32 with compiled kernels.

Unlike in `ReferenceVision`, embedding, blocks and pooling are compiled kernels, and intermediate states stay in memory
that is kept between requests.
"""

import torch

from experiment_core_utils.engines.cpu.attention import cpu_attention
from experiment_core_utils.engines.cpu.panels import Workspace, refuse_other_places
from experiment_core_utils.engines.cpu.vision_block import (
    VisionBlockKernel,
    embedding_kernel,
    pooling_kernel,
)
from experiment_core_utils.engines.reference.vision import ReferenceVision, padding_crops
from experiment_core_utils.engines.weights import VisionModules


class CpuVision(ReferenceVision):
    """A `VisionEngine`.

    Raises:
        ConfigurationError: the tower is not in float32 on the CPU, or the kernels cannot be compiled for it here.
    """

    def __init__(self, tower: VisionModules) -> None:
        super().__init__(tower)
        refuse_other_places(tower.weight.device, tower.weight.dtype)
        self._attention = cpu_attention(tower.weight.shape[1] // self._heads)
        self._memory = Workspace()
        self._kernels = [VisionBlockKernel(block) for block in self._blocks]
        self._embedding = embedding_kernel(self._tower.embeddings, self._tower.pre_layernorm)
        self._pooling = pooling_kernel(self._connector)

    def _patch_states(self, pixel_values: torch.Tensor) -> torch.Tensor:
        tower, states = self._tower, self._embedding.states(pixel_values.contiguous())
        crops, tokens, width = states.shape
        features = self._memory.buffer("features", crops, tokens - 1, width * len(tower.feature_blocks))
        for index, kernel in enumerate(self._kernels):
            self._advance(kernel, states)
            for place, wanted in enumerate(tower.feature_blocks):
                if wanted == index:
                    features[:, :, place * width : (place + 1) * width] = states[:, 1:]
        for crop in padding_crops(pixel_values, tower.pad_value):
            features[crop] = 0
        return features

    def _advance(self, kernel: VisionBlockKernel, states: torch.Tensor) -> None:
        """[K, T, C] through a block, where they lie."""
        rows = states.flatten(0, 1)
        joint = kernel.project(rows, self._memory.buffer("joint", len(rows), 3 * kernel.width))
        queries, keys, values = joint.view(*states.shape[:2], 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        kernel.finish(self._attention(queries, keys, values, False).flatten(0, 1), rows)

    def _connected(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        attended = self._pooling.pooled(features, image_masks.float().contiguous())
        projected: torch.Tensor = self._connector.project_attended(attended)
        return projected
