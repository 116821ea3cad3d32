"""Tiny random models whose vision tower kernels compute: odd numbers of heads, which end within a vector."""

from typing import Any

import torch

from tests.models.knob_families import enlarge_norms
from tests.models.tiny_families import CROP_FAMILIES, build, crop_inputs

# CLIP with quick-GELU and a class token, SigLIP with GELU by tanh; Idefics 3 gives a mask of patches.
TOWERS = ("llava", "llava, two feature layers", "llava, siglip", "llava_next", "smolvlm", "idefics3")
HEADS, HEAD_WIDTH, INNER = 3, 40, 52


def towered(name: str, **chosen: Any) -> Any:
    """A random model in evaluation mode, of `CROP_FAMILIES`; `chosen` of its tower's config."""
    config = CROP_FAMILIES[name]()
    sizes = {"hidden_size": HEADS * HEAD_WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER}
    for key, value in {**sizes, **chosen}.items():
        setattr(config.vision_config, key, value)  # type: ignore[attr-defined]
    model = enlarge_norms(build(config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def pictures(name: str, crops: int) -> dict[str, torch.Tensor]:
    """The arguments of the vision stage for so many crops, LLaVA-NeXT's at least 2."""
    torch.manual_seed(crops)
    return crop_inputs(name, crops)[1]
