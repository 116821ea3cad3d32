"""Which knobs the families of transformers' causal, or image-text, models have, tried on a tiny model of each.

    python -m tests.models.family_knobs [FAMILY ...] [--image_text] [--jobs 0] [--table FILE]

Knobs of pictures are tried where a tiny checkpoint with a processor is made (`tests.models.tiny_checkpoints`).
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import ACTIVE_BLOCKS
from experiment_core_utils.knobs.expert_mass import EXPERT_MASS
from experiment_core_utils.knobs.interface import Knob
from experiment_core_utils.knobs.top_k import TOP_K
from experiment_core_utils.knobs.vision_tokens import VISION_TOKENS
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from tests.models.causal_families import image_text_types, model_types, tiny_config
from tests.models.family_table import made_with, rows_of, table_parser, told
from tests.models.tiny_checkpoints import TRIED_FAMILIES, VARIANTS, VISION_FAMILIES, write_checkpoint

# Of a model with values; not all sizes of towers for pictures and sounds are known to be tiny.
MOST_PARAMETERS = 3e8
_NO_PROCESSOR = "no tiny processor is made for it"


@dataclass(frozen=True)
class FamilyKnobs:
    """Whether a family has each knob: `yes`, or why not; nothing where a text model needs no reason."""

    family: str
    vision: str
    kept: str
    top_k: str
    expert_mass: str
    blocks: str
    made_with: str = ""


_KNOBS: dict[str, Knob[Any]] = {
    "vision": VISION_TOKENS, "kept": VISUAL_TOKEN_KEEP, "top_k": TOP_K, "expert_mass": EXPERT_MASS,
    "blocks": ACTIVE_BLOCKS,
}  # fmt: skip


def knobs_of_causal(family: str, device: torch.device) -> FamilyKnobs:
    return _tried(family, device, AutoModelForCausalLM, "")


def knobs_of_image_text(family: str, device: torch.device) -> FamilyKnobs:
    if family in (*VISION_FAMILIES, *TRIED_FAMILIES, *VARIANTS):
        return _of_checkpoint(family, device)
    return _tried(family, device, AutoModelForImageTextToText, _NO_PROCESSOR)


def failed(family: str, reason: str, device: torch.device | None = None) -> FamilyKnobs:
    reasons = dict.fromkeys(_KNOBS, f"not built: {reason}")
    return FamilyKnobs(family, **reasons, made_with="" if device is None else made_with(device))


def _tried(family: str, device: torch.device, maker: Any, without_pictures: str) -> FamilyKnobs:
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            model = maker.from_config(tiny_config(family), dtype=torch.float32).eval()
        # Another is tried without values, as every model is before it is loaded.
        if sum(each.numel() for each in model.parameters()) < MOST_PARAMETERS:
            model = maker.from_config(tiny_config(family), dtype=torch.float32).eval().to(device)
    except Exception as error:
        return failed(family, told(error), device)
    pictures = {"vision": without_pictures, "kept": without_pictures}
    try:
        adapters: Any = DecoderKnobs(model).adapters
        found = {name: adapters[knob.name].unsupported_reason for name, knob in _KNOBS.items() if name not in pictures}
    except Exception as error:
        found = dict.fromkeys(_KNOBS.keys() - pictures, told(error))
    return FamilyKnobs(family, **pictures, **_shown(found), made_with=made_with(device))


def _of_checkpoint(family: str, device: torch.device) -> FamilyKnobs:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = str(write_checkpoint(family, Path(folder) / family))
            config = parse_config(["--model_path", path, "--device", device.type, "--execution", "eager"])
            model = find_model(path).load(config.model, device)
        except Exception as error:
            return failed(family, told(error), device)
        assert isinstance(model, TransformersModel)
        adapters = model.turned_knobs.adapters
        reasons = _shown({name: adapters[knob.name].unsupported_reason for name, knob in _KNOBS.items()})
    named = {name: reason.replace(path, "the checkpoint") for name, reason in reasons.items()}
    return FamilyKnobs(family, **named, made_with=made_with(device))


def _shown(reasons: dict[str, str | None]) -> dict[str, str]:
    return {name: "yes" if reason is None else " ".join(reason.split()) for name, reason in reasons.items()}


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--image_text", action="store_true", help="image-text-to-text models in place of causal ones")
    given = parser.parse_args()
    every, row_of = (image_text_types, knobs_of_image_text) if given.image_text else (model_types, knobs_of_causal)
    rows_of("tests.models.family_knobs", given, given.families or every(), row_of, failed)


if __name__ == "__main__":
    main()
