"""Operations of each stage by formula, from a transformers config, a setting of the knobs and a request's sizes.

    architecture = architecture_of(config)          # once, from the config of the model as it was trained
    architecture.at(setting).request_flops(RequestSize(prompt_tokens=300, output_tokens=32, crops=5))

Plain arithmetic on the config: no weights, so that quantised models have the operations of full precision. `decoder.py`
and `vision.py` say what counts and what does not. The head runs where `generate()` needs it: on the last position of a
prefill, and on each decoded token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.models.costs.decoder import DecoderShape
from experiment_core_utils.models.costs.decoder_table import DECODERS, NotInTable, decoder_of, unknown
from experiment_core_utils.models.costs.vision_table import (
    CropVision,
    PatchVision,
    Vision,
    aria_vision,
    glm4v_vision,
    idefics3_vision,
    internvl_vision,
    llava_vision,
    molmoe_vision,
    qwen2_5_vl_vision,
    qwen3_vl_vision,
)
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.records.requests import RequestFlops, RequestSize, StageFlops

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
    "glm4v": glm4v_vision,
    "glm4v_moe": glm4v_vision,
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


@dataclass(frozen=True)
class Architecture:
    """A known architecture; `vision` is None for a text model."""

    model_type: str
    decoder: DecoderShape
    vision: Vision | None

    def at(self, setting: Setting) -> "Architecture":
        """The architecture as it runs at a setting; see `DecoderShape.at`."""
        return replace(self, decoder=self.decoder.at(setting))

    def vision_flops(self, size: RequestSize) -> int | None:
        """FLOPs of tower and projector for the pictures of one request; None without a picture.

        Raises:
            ConfigurationError: a picture for a text model, one of the other kind than the model takes, or too little
                said of it.
        """
        if not size.crops and not size.patches:
            return None
        if self.vision is None:
            raise ConfigurationError(f"{self.model_type} takes no pictures; give no crops and no patches")
        if isinstance(self.vision, PatchVision):
            if size.crops:
                raise ConfigurationError(f"{self.model_type} takes pictures as they are; give patches, no crops")
            grids = size.grids or [None] * len(size.patches)
            shape = self.vision.shape
            return sum(shape.flops(patches, grid) for patches, grid in zip(size.patches, grids, strict=True))
        if size.patches:
            raise ConfigurationError(f"{self.model_type} cuts pictures into crops; give crops, no patches")
        if isinstance(self.vision, CropVision):
            return size.crops * self.vision.flops_per_crop
        known = dict(self.vision.flops_of)
        if size.crop_features not in known:
            raise ConfigurationError(
                f"crops of {self.model_type} give one of {sorted(known)} features each, not {size.crop_features}"
            )
        return size.crops * known[size.crop_features]

    def prefill_flops(self, prompt_tokens: int) -> int:
        """FLOPs of the blocks for every position of the prompt, and of the head for the last one."""
        return self.decoder.prefill_flops(prompt_tokens)

    def forward_flops(self, tokens: int) -> int:
        """FLOPs of blocks and head for every position of a text: a forward pass with logits at every position."""
        return self.decoder.forward_flops(tokens)

    def request_flops(self, size: RequestSize) -> RequestFlops:
        """FLOPs of every stage of `size.requests` requests, and their sum.

        Raises:
            ConfigurationError: a picture that the model cannot take.
        """
        vision = self.vision_flops(size)
        steps = max(size.output_tokens - 1, 0)
        decode = size.requests * self.decoder.decode_flops(size.prompt_tokens + 1, steps) if steps else 0
        stages = StageFlops(
            vision_flops=None if vision is None else size.requests * vision,
            prefill_flops=size.requests * self.prefill_flops(size.prompt_tokens),
            decode_flops_per_token=decode / steps if steps else None,
        )
        return RequestFlops(stages, decode)


@dataclass(frozen=True)
class UnknownArchitecture:
    """An architecture that no formula is known for."""

    reason: str


def architecture_of(config: Any, routed: Sequence[bool] | None = None) -> Architecture | UnknownArchitecture:
    """The architecture that a transformers config describes, before any knob is turned in it.

    Args:
        config: of the model.
        routed: whether each block has experts, where that is known of a model's modules; None for what follows from
            the places of the blocks.
    """
    try:
        decoder, vision = shapes_of(config, routed)
    except NotInTable as unknown:
        return UnknownArchitecture(str(unknown))
    return Architecture(config.model_type, decoder, vision)
