"""In: a transformers config; out: the shapes that its operations follow from, by an explicit table of `model_type`s.

Decoders are in `decoder_table`, vision stages in `vision_table`. The config is that of the model as it was trained;
weights, their precision and their packing play no part.
"""

from collections.abc import Callable, Sequence
from typing import Any

from experiment_core_utils.models.config_fields import unknown
from experiment_core_utils.models.decoder_flops import DecoderShape
from experiment_core_utils.models.decoder_table import DECODERS, decoder_of
from experiment_core_utils.models.vision_table import (
    Vision,
    aria_vision,
    glm4v_moe_vision,
    idefics3_vision,
    internvl_vision,
    llava_vision,
    molmoe_vision,
    qwen2_5_vl_vision,
    qwen3_vl_vision,
)

_VISION_MODELS: dict[str, Callable[[Any], Vision]] = {
    "llava": llava_vision,
    "llava_next": llava_vision,
    "internvl": internvl_vision,
    "idefics3": idefics3_vision,
    "smolvlm": idefics3_vision,
    "aria": aria_vision,
    "qwen2_5_vl": qwen2_5_vl_vision,
    "qwen3_vl": qwen3_vl_vision,
    "qwen3_vl_moe": qwen3_vl_vision,
    "glm4v_moe": glm4v_moe_vision,
    "molmoe": molmoe_vision,
}


def shapes_of(config: Any, routed: Sequence[bool] | None = None) -> tuple[DecoderShape, Vision | None]:
    """Decoder and vision stage of an architecture; the latter is None for a text model.

    Args:
        config: of the model.
        routed: see `decoder_of`.

    Raises:
        NotInTable: it is not known.
    """
    if config.model_type in DECODERS:
        return decoder_of(config, routed), None
    vision_of = _VISION_MODELS.get(config.model_type)
    if vision_of is None:
        raise unknown(config.model_type, (*DECODERS, *_VISION_MODELS))
    head_rows = config.head_vocab_size if config.model_type == "molmoe" else None
    return decoder_of(config.text_config, routed, head_rows), vision_of(config)
