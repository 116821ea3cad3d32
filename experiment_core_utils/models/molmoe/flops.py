"""Floating-point operations of the vision stage of MolmoE, by formula.

Conventions as in `costs.decoder`, which has the formulas of the decoder. The products are those of Dosovitskiy et al.
2020 (ViT) and Deitke et al. 2024 (Molmo).
"""

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig


def vision_flops(config: MolmoeConfig, crops: int) -> int:
    """FLOPs of vision tower and connector for `crops` crops, the one of the whole picture counted."""
    vision = config.vision_config
    width, patches = vision.hidden_size, config.patches_per_side**2
    tokens = patches + 1
    depth = vision.num_hidden_layers
    blocks = depth if config.keep_unused_vision_blocks else max(depth + i for i in config.vision_feature_layers) + 1
    embedding = 2 * patches * 3 * vision.patch_size**2 * width
    linear = 2 * tokens * (4 * width**2 + 2 * width * vision.intermediate_size)
    attention = 4 * tokens**2 * width
    return crops * (embedding + blocks * (linear + attention) + _connector_flops(config))


def _connector_flops(config: MolmoeConfig) -> int:
    width = config.vision_config.hidden_size
    stacked = width * len(config.vision_feature_layers)
    features, patches = config.features_per_crop, config.patches_per_side**2
    window = config.pooling_size**2
    query = 2 * features * stacked * width
    keys_and_values = 2 * 2 * patches * stacked * width
    attention = 4 * features * window * width
    output = 2 * features * width**2
    hidden = config.projector_hidden_size
    projector = 2 * features * (2 * width * hidden + hidden * config.text_config.hidden_size)
    return query + keys_and_values + attention + output + projector
