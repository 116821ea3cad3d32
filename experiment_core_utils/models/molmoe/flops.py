"""Operations of each stage of MolmoE by formula, from its configuration, a setting and token counts.

Convention: one multiply-add is 2 operations; attention counts the full rectangle of queries and keys, although a
causal kernel may skip half of it. Not counted: look-ups, norms, rotary positions, softmax, the elementwise product of
gated units, sorting experts (well below 1 % together). The formulas are the matrix products of the architecture:
Muennighoff et al. 2024 (OLMoE), Dosovitskiy et al. 2020 (ViT), Deitke et al. 2024 (Molmo).
"""

from collections.abc import Sequence

from experiment_core_utils.models.molmoe.configuration_molmoe import MolmoeConfig
from experiment_core_utils.primitives.knobs import KnobSetting
from experiment_core_utils.records.requests import StageFlops


def request_flops(
    config: MolmoeConfig, setting: KnobSetting, crops: int, prompt_tokens: int, output_tokens: int
) -> StageFlops:
    """Each stage of one request; `crops` counts the one of the whole picture and is 0 without a picture.

    The configuration is that of the model as it was trained: block 0 keeps its experts per token.
    """
    own = int(config.text_config.num_experts_per_tok)
    experts = [own if block == 0 else setting.experts for block in setting.active_blocks]
    return StageFlops(
        vision_flops=vision_flops(config, crops) if crops else None,
        prefill_flops=decoder_flops(config, prompt_tokens, prompt_tokens, experts),
        decode_flops_per_token=mean_decode_flops(config, prompt_tokens, output_tokens, experts),
    )


def vision_flops(config: MolmoeConfig, crops: int) -> int:
    """Vision tower and connector for `crops` crops, the one of the whole picture counted."""
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


def decoder_flops(config: MolmoeConfig, new_tokens: int, attended: int, experts_by_block: Sequence[int]) -> int:
    """Blocks and head of one forward pass; the head runs on one position.

    Args:
        new_tokens: S, positions computed.
        attended: T, keys that each of them sees (prefill: S; decode: prompt and what was generated so far).
        experts_by_block: experts per token for each block that runs.
    """
    text = config.text_config
    width = text.hidden_size
    head_dim = width // text.num_attention_heads
    kv_width = head_dim * text.num_key_value_heads
    projections = 2 * new_tokens * (2 * width * width + 2 * width * kv_width)
    attention = 4 * new_tokens * attended * width
    router = 2 * new_tokens * width * text.num_experts
    expert = 6 * new_tokens * width * text.intermediate_size
    blocks = sum(projections + attention + router + experts * expert for experts in experts_by_block)
    return blocks + 2 * width * config.head_vocab_size


def mean_decode_flops(
    config: MolmoeConfig, prompt_tokens: int, output_tokens: int, experts_by_block: Sequence[int]
) -> float | None:
    """Mean over the n - 1 decode steps of n output tokens; None for fewer than 2 tokens.

    Step i (from 1) attends to the prompt and i generated tokens. Every term is linear in the keys, so the mean over
    steps is the value at the mean number of keys; twice the mean is a whole number, which keeps it exact.
    """
    if output_tokens < 2:
        return None
    first = decoder_flops(config, 1, prompt_tokens + 1, experts_by_block)
    last = decoder_flops(config, 1, prompt_tokens + output_tokens - 1, experts_by_block)
    return (first + last) / 2
