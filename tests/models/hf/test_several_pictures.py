"""Questions about several pictures: places in a prompt, geometry together, and requests of real families."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from experiment_core_utils.knobs.vision_tokens import TIERS, CropRange
from experiment_core_utils.models.hf.adapter import TransformersModel
from experiment_core_utils.models.hf.knobs.patches import fields_in_force
from experiment_core_utils.models.hf.processor import load_hf_processor
from experiment_core_utils.models.hf.requests import HFRequests, PromptLayout
from experiment_core_utils.models.hf.several_pictures import joined, options_of_all, placed
from experiment_core_utils.models.hf.tilings import LongestEdgeTiles
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.records.requests import RequestShape, VisionGeometry
from experiment_core_utils.tasks.interface import Sample
from tests.models.tiny_checkpoints import write_checkpoint

LOW = TIERS["low"]
FAMILIES = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl_moe", "internvl", "smolvlm", "idefics3", "glm4v_moe")


@pytest.mark.parametrize(
    ("prompt", "num_pictures", "parts"),
    [
        ("Which?", 0, ["Which?"]),
        ("Is <image 1> red?", 1, [0, "Is <image 1> red?"]),
        ("Which?", 2, [0, 1, "Which?"]),
        ("Is <image 1> or <image 2> red?", 2, ["Is ", 0, " or ", 1, " red?"]),
        ("<image 2>Which?<image 1>", 2, [1, "Which?", 0]),
        # Named twice it stands at the first place; one that is not named stands in front, one that is not there stays.
        ("<image 2> or <image 2>, <image 4>?", 3, [0, 2, 1, " or <image 2>, <image 4>?"]),
    ],
)
def test_each_picture_has_its_place(prompt: str, num_pictures: int, parts: list[str | int]) -> None:
    assert placed(prompt, num_pictures) == parts


class Renderer:
    """A tokenizer whose template writes parts one after the other, or the pictures first."""

    bos_token = None

    def __init__(self, pictures_first: bool, most: int = 9) -> None:
        self.pictures_first, self.most = pictures_first, most

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        (message,) = messages
        parts = message["content"]
        if self.pictures_first:
            parts = sorted(parts, key=lambda part: part["type"] != "image")
        texts = [part.get("text", "[P]") for part in parts]
        return "".join(texts[: self.most])


def layout(pictures_first: bool, most: int = 9) -> PromptLayout:
    return PromptLayout(Renderer(pictures_first, most), "template", "[P]", takes_parts=True)


def test_a_template_that_puts_pictures_in_front_keeps_the_marks() -> None:
    prompt = "Is <image 2> or <image 1> red?"
    assert layout(False).text(prompt, 2) == "Is [P] or [P] red?"
    assert layout(False).places(prompt, 2) == ["Is ", 1, " or ", 0, " red?"]
    assert layout(True).text(prompt, 2) == f"[P][P]{prompt}"
    assert layout(True).places(prompt, 2) == [0, 1, prompt]
    with pytest.raises(SampleError, match="its 3 pictures have no place in the chat template"):
        layout(False, most=2).text("Which?", 3)
    bare = PromptLayout(Renderer(False), None, "[P]", takes_parts=False)
    assert bare.text("Which?", 2) == "[P]\n[P]\nWhich?"
    assert bare.text("A <image 1> b", 2) == "[P]\nA [P] b"
    paligemma = replace(bare, after_picture="")
    assert paligemma.text("A <image 1> b", 2) == "[P][P]A <image 1> b"


def test_geometries_add_up() -> None:
    crops = VisionGeometry(6, (2, 3), (32, 48), 28), VisionGeometry(1, (1, 1), (16, 16), 4, has_overview=False)
    both = joined(crops)
    assert (both.num_crops, both.tiling, both.total_crops, both.pooled_features) == (7, None, 7 + 1, 32)
    assert both.crop_features == 4 and both.patches is None
    grids = [VisionGeometry(0, None, None, n // 4, patches=n, patch_grid=(2, n // 2)) for n in (8, 16)]
    shape = RequestShape(None, joined(grids), 6, 0, 10, 0.0)
    size = shape.size(3)
    assert (size.patches, size.grids, size.crops, size.prompt_tokens) == ((8, 16), ((2, 4), (2, 8)), 0, 16)
    assert shape.layout == ((None, None), (None, None))
    assert joined(crops[:1]) is crops[0]


def test_options_of_pictures_of_other_shapes_keep_the_upper_bound() -> None:
    """8 crops allow a grid of 2 x 3 tiles for 3:2, scaled to a longer side of 3, and 2 x 2 for a square."""
    rule, crops = LongestEdgeTiles(32, 4), CropRange(1, 8)
    wide, square = (60, 40), (40, 40)
    assert rule.options_for(crops, *wide)["size"] == {"longest_edge": 3 * 32}
    assert options_of_all(rule, crops, [wide, square])["size"] == {"longest_edge": 2 * 32}
    assert options_of_all(None, crops, [wide]) == {}


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def asked(*images: Image.Image) -> Sample:
    return Sample(7, "p", "q", ("a",), images[0], "w", further_images=images[1:])


WIDE, HIGH, LONG = picture(60, 40, 1), picture(40, 60, 2), picture(90, 30, 3)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def made(family: str) -> tuple[HFRequests, Any]:
        folder: Path = write_checkpoint(family, tmp_path_factory.mktemp(family))
        model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        return HFRequests(load_hf_processor(folder), AutoConfig.from_pretrained(folder), family), model

    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_with_several_pictures(model_of: Any, family: str) -> None:
    requests, model = model_of(family)
    single = [requests.make(asked(each), "Which?", LOW).shape for each in (WIDE, HIGH)]
    both = requests.make(asked(WIDE, HIGH), "Is it <image 1> or <image 2>?", LOW)
    assert both.shape.vision_tokens == sum(each.vision_tokens for each in single)
    assert both.shape.actual.total_crops == sum(each.actual.total_crops for each in single)
    assert both.shape.size(2).patches == sum((each.size(2).patches for each in single), ())
    # Numbered otherwise, they are the same request.
    other = requests.make(asked(HIGH, WIDE), "Is it <image 2> or <image 1>?", LOW)
    assert all(torch.equal(both.inputs[name], other.inputs[name]) for name in both.inputs)
    assert requests.make(asked(WIDE, HIGH, LONG), "Which?", LOW).shape.vision_tokens > both.shape.vision_tokens
    # The stages give what the model gives by itself.
    staged = TransformersModel(family, model, requests, "eager")
    with torch.inference_mode(), fields_in_force(model.config, requests.config_for(LOW)):
        logits, _ = staged.prefill(both.inputs, staged.encode_image(both.inputs))
        whole = model(**both.inputs).logits[:, -1]
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-5)
