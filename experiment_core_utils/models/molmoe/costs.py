"""A Molmo's parameters and the elements of its largest activations, by formula.

The formulas count what the stages of `modeling_molmoe.py` have at the same time when nothing is materialised
that a fused kernel avoids: attention without its matrix of scores, experts as grouped GEMMs over all routed tokens at
once. Not counted: the allocator's rounding and reserve, workspaces of libraries, the context of the device.
"""

import copy

import torch

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration


def parameter_count(config: MolmoeConfig) -> int:
    """Parameters of the whole model, whatever blocks are active: built without storage and counted."""
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration(copy.deepcopy(config))
    return sum(parameter.numel() for parameter in model.parameters())


def activation_elements(config: MolmoeConfig, crops: int, prompt_tokens: int, top_k: int) -> int:
    """The most elements that one stage has at a time beside weights and cache; stages run one after the other.

    Args:
        crops: crops of the picture, the one of the whole picture counted; 0 without a picture.
        prompt_tokens: positions of the prefill.
        top_k: most experts per token in any block that runs; 1 in a dense model, whose MLP counts as an expert.
    """
    return max(_vision_elements(config, crops), _prefill_elements(config, crops, prompt_tokens, top_k))


def _vision_elements(config: MolmoeConfig, crops: int) -> int:
    """Elements of pixels, the kept states, and the wider of a block's MLP (input, hidden twice, output) or the
    connector's pooling (features, their windows, keys and values).
    """
    vision = config.vision_config
    width, patches = vision.hidden_size, config.patches_per_side**2
    pixels = 3 * vision.image_size**2
    kept = patches * width * len(config.vision_feature_layers)
    block = (patches + 1) * (2 * width + 2 * vision.intermediate_size)
    pooling = 2 * kept + 2 * patches * width
    return int(crops * (pixels + kept + max(block, pooling)))


def _prefill_elements(config: MolmoeConfig, crops: int, tokens: int, top_k: int) -> int:
    """Elements of the picture's features; for each token residual, normed input and output, and the wider of attention
    (queries, keys, values, result) or the experts' rows (input, gate and up, their product, output), one row an expert.
    """
    text = config.text_config
    width = text.hidden_size
    experts = top_k * (2 * width + 3 * text.intermediate_size)
    features = crops * config.features_per_crop * width
    return int(features + tokens * (3 * width + max(4 * width, experts)))
