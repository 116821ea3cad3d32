"""The reference engine of the vision stage: plain torch with fewer passes over memory.

Queries, keys and values are one product, the quick GELU is one operation between two products, and padding is handled
only where a crop or a patch is padding. Only the blocks whose output is used run, as in the tower itself.
"""

import torch
from torch.nn import functional as F

from experiment_core_utils.engines.api import VisionEngine
from experiment_core_utils.engines.weights import VisionBlockWeights, VisionModules

# x * sigmoid(1.702 * x)
QUICK_GELU = 1.702


class ReferenceVision(VisionEngine):
    """A `VisionEngine` that runs anywhere and needs nothing prepared."""

    def __init__(self, tower: VisionModules) -> None:
        self._tower = tower
        self._connector = tower.connector
        self._heads = tower.num_heads
        self._blocks = tower.blocks

    def warm_up(self, crops: int) -> None:
        pass

    @torch.inference_mode()
    def encode(self, pixel_values: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        features = self._connected(self._patch_states(pixel_values), image_masks)
        return features.flatten(0, 1)

    def _patch_states(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Patch states [K, P, C * L] of crops [K, 3, S, S]."""
        tower = self._tower
        states = tower.pre_layernorm(tower.embeddings(pixel_values))
        kept = {}
        for index, block in enumerate(self._blocks):
            states = self._run(block, states)
            kept[index] = states
        features = torch.cat([kept[index][:, 1:] for index in tower.feature_blocks], dim=-1)
        for crop in padding_crops(pixel_values, tower.pad_value):
            features[crop] = 0
        return features

    def _run(self, block: VisionBlockWeights, states: torch.Tensor) -> torch.Tensor:
        joint = F.linear(block.first_norm(states), block.qkv, block.qkv_bias).unflatten(2, (3, self._heads, -1))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        states = F.linear(attended, block.output, block.output_bias).add_(states)
        rows = block.second_norm(states).flatten(0, 1)
        hidden = torch.addmm(block.inner_bias, rows, block.inner.t(), beta=QUICK_GELU, alpha=QUICK_GELU)
        hidden = F.silu(hidden, inplace=True)
        rows = torch.addmm(block.outer_bias, hidden, block.outer.t(), alpha=1 / QUICK_GELU)
        return rows.view_as(states).add_(states)

    def _connected(self, features: torch.Tensor, image_masks: torch.Tensor) -> torch.Tensor:
        """Features [K, F, H] of patch states [K, P, C * L]; the learnt padding is added where there is some."""
        connector = self._connector
        if bool((image_masks < 1).any()):
            return connector(features, image_masks)
        return connector.project(features)


def padding_crops(pixel_values: torch.Tensor, pad_value: float) -> list[int]:
    """Indices of the crops whose values are all those of padding; the first row of each rules out most others."""
    doubtful = (pixel_values[:, 0, 0] == pad_value).all(dim=1).nonzero().flatten().tolist()
    return [crop for crop in doubtful if bool((pixel_values[crop] == pad_value).all())]
