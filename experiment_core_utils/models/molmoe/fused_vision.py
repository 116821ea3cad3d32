"""In: the vision tower of a MolmoE model in float32 on the CPU, and crops; out: features, blocks in three calls each.

As `CpuVision`, but the products of a block are compiled too, with the norms before and the activations and sums
behind them, so that spans of rows pass through them within the cache; so are the embedding of patches and the pooling
of windows. The weights are copied into panels for it.
"""

import torch

from experiment_core_utils.models.molmoe.compiled_vision import KernelVision
from experiment_core_utils.models.molmoe.cpu_kernels.vision_block import VisionBlockKernel, vision_block_kernel
from experiment_core_utils.models.molmoe.cpu_kernels.vision_ends import embedding_kernel, pooling_kernel
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.straight_vision import FusedVisionBlock


class CpuFusedVision(KernelVision):
    """A `VisionEngine`.

    Raises:
        ConfigurationError: as of `KernelVision`.
    """

    def __init__(self, model: MolmoeForConditionalGeneration) -> None:
        super().__init__(model)
        self._fused: dict[int, VisionBlockKernel] = {
            id(block): vision_block_kernel(block.layer, block.qkv, block.qkv_bias) for block in self._blocks
        }
        self._embedding = embedding_kernel(self._tower.embeddings, self._tower.pre_layernorm)
        self._pooling = pooling_kernel(self._connector)

    def _embedded(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self._embedding.states(pixel_values.contiguous())

    def _connected(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        attended = self._pooling.pooled(features, image_masks.float().contiguous())
        projected: torch.Tensor = self._connector.project_attended(attended)
        return projected

    def _advance(self, block: FusedVisionBlock, states: torch.Tensor) -> None:
        kernel, rows = self._fused[id(block)], states.flatten(0, 1)
        joint = kernel.project(rows, self._memory.buffer("joint", len(rows), len(block.qkv)))
        queries, keys, values = joint.view(*states.shape[:2], 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        kernel.finish(self._attention(queries, keys, values, False).flatten(0, 1), rows)
