"""The vision stage in Triton kernels: patches to projected image features.

Importing this module needs Triton.
"""

import torch
from torch.nn.functional import linear

from experiment_core_utils.engines.gpu.triton.norms import gated
from experiment_core_utils.engines.gpu.triton.prefill_forward import attention
from experiment_core_utils.engines.gpu.triton.vision_ops import (
    add_norm,
    embed_norm,
    pool,
    quick_gelu_in_place,
    stack,
)
from experiment_core_utils.engines.weights import ConnectorWeights, VisionBlockWeights, VisionWeights


def encode(
    vision: VisionWeights, patches: torch.Tensor, is_real: torch.Tensor, image_masks: torch.Tensor
) -> torch.Tensor:
    """Features of all crops of a request at once.

    Args:
        patches: [N * P, C], each patch's pixels in the order of `vision.patch_weight`'s columns.
        is_real: [N] bool, False for a crop that is padding.
        image_masks: [N, P] in the weights' dtype.

    Returns:
        features [N * F, H].
    """
    crops = is_real.shape[0]
    connector = vision.connector
    stacked = connector.pads.shape[1]
    features = torch.empty((patches.shape[0], stacked), dtype=patches.dtype, device=patches.device)
    windows = patches.shape[0] // connector.window**2
    means = torch.empty((windows, stacked), dtype=patches.dtype, device=patches.device)
    embedded = linear(patches, vision.patch_weight)
    states, normed = embed_norm(
        embedded, vision.class_embedding, vision.positions, vision.before, vision.blocks[0].first_norm
    )
    for index, block in enumerate(vision.blocks):
        normed = add_norm(states, _attend(block, normed, crops, vision.num_heads), block.second_norm)
        inner = linear(normed, block.inner, block.inner_bias)
        quick_gelu_in_place(inner)
        branch = linear(inner, block.outer, block.outer_bias)
        # After the last block the norm is of no use; one launch more would cost as much.
        after = vision.blocks[min(index + 1, len(vision.blocks) - 1)].first_norm
        normed = add_norm(states, branch, after)
        for layer in [layer for layer, wanted in enumerate(vision.feature_blocks) if wanted == index]:
            stack(states, is_real, image_masks, connector, layer, features, means)
    return _project(connector, features, means)


def _attend(block: VisionBlockWeights, normed: torch.Tensor, crops: int, heads: int) -> torch.Tensor:
    """Attention of a block and its output product: [N * T, D] -> [N * T, D]."""
    rows, width = normed.shape
    qkv_states = linear(normed, block.qkv, block.qkv_bias).view(crops, rows // crops, 3, heads, width // heads)
    queries, keys, values = qkv_states.permute(2, 0, 3, 1, 4)
    attended = attention(queries, keys, values, causal=False).reshape(rows, width)
    return linear(attended, block.output, block.output_bias)


def _project(connector: ConnectorWeights, features: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    queries = linear(means, connector.query, connector.query_bias)
    keys_values = linear(features, connector.key_value, connector.key_value_bias)
    pooled = linear(pool(queries, keys_values, connector.num_heads), connector.output, connector.output_bias)
    return linear(gated(linear(pooled, connector.gate_up)), connector.down)
