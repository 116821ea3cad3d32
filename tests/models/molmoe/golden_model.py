"""Builds the tiny MolmoE of `tests/goldens/molmoe` from its weight rule, and its pictures from theirs."""

import hashlib
import json
import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiment_core_utils.models.molmoe.checkpoint.published import assemble, native_shapes, published_layout
from experiment_core_utils.models.molmoe.checkpoint.published_config import config_from_published
from experiment_core_utils.models.molmoe.image_processing_molmoe import MolmoeImageProcessor
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens

GOLDENS = Path(__file__).parents[2] / "goldens" / "molmoe"


@dataclass(frozen=True)
class Goldens:
    spec: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def expected(self, case: str, name: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self.arrays[f"{case}/{name}"]))

    def tolerance(self, kind: str) -> float:
        return float(self.spec["tolerances"][kind]["atol"])


@cache
def load_goldens(folder: Path = GOLDENS) -> Goldens:
    spec = json.loads((folder / "spec.json").read_text())
    with np.load(folder / "arrays.npz") as stored:
        return Goldens(spec, {name: stored[name] for name in stored.files})


def published_tensors(spec: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {}
    for entry in spec["weights"]["tensors"]:
        seed = zlib.crc32(entry["name"].encode()) & 0xFFFFFFFF
        noise = np.random.RandomState(seed).standard_normal(tuple(entry["shape"])).astype(np.float32)
        weight = np.float32(entry["offset"]) + np.float32(entry["scale"]) * noise
        tensors[entry["name"]] = torch.from_numpy(weight)
    return tensors


@cache
def golden_model() -> MolmoeForConditionalGeneration:
    spec = load_goldens().spec
    config = config_from_published(spec["config"])
    model = MolmoeForConditionalGeneration(config).eval()
    shapes = native_shapes(config)
    layout, tensors = published_layout(config, shapes), published_tensors(spec)
    cpu = torch.device("cpu")
    model.load_state_dict(assemble(layout, shapes, tensors.__getitem__, torch.float32, cpu, shapes), strict=True)
    return model


def golden_image(case: dict[str, Any]) -> np.ndarray:
    height, width = case["height"], case["width"]
    source = np.random.RandomState(case["image_seed"])
    coarse = source.randint(0, 256, (math.ceil(height / 32), math.ceil(width / 32), 3))
    noise = source.randint(0, 256, (height, width, 3))
    blocks = np.repeat(np.repeat(coarse, 32, axis=0), 32, axis=1)[:height, :width]
    image = ((3 * blocks + noise) // 4).astype(np.uint8)
    assert hashlib.sha256(image.tobytes()).hexdigest() == case["image_sha256"]
    return image


def golden_processor(spec: dict[str, Any], max_crops: int) -> MolmoeImageProcessor:
    config = spec["config"]
    return MolmoeImageProcessor(overlap_margins=tuple(config["overlap_margins"]), max_crops=max_crops)


def golden_tokens(spec: dict[str, Any]) -> ImageTokens:
    tokens = spec["tokens"]
    return ImageTokens(
        bos=tokens["bos"],
        start=tokens["im_start"],
        end=tokens["im_end"],
        patch=tokens["im_patch"],
        column=tokens["im_col"],
    )
