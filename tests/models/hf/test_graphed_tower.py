"""Pictures by recorded encoders, against the modules that were recorded."""

from typing import Any

import pytest
import torch

from experiment_core_utils.engines.cuda_graphs import Reruns
from experiment_core_utils.models.hf.generate import GenerateStages
from experiment_core_utils.models.hf.graphed_tower import GraphedTower
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.models.knob_families import VISION_FAMILIES
from tests.models.recorded_replays import RecordedReplays


def rows(features: Any) -> torch.Tensor:
    found = features if isinstance(features, torch.Tensor | list | tuple) else features.pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


def tower_of(model: Any, capturer: Any = None) -> tuple[GraphedTower, GenerateStages]:
    stages = GenerateStages(model)
    return GraphedTower(model, capturer or RecordedReplays(), lambda: None, stages.host_copy), stages


# They look at the pixels for pictures that are only padding.
READ_PIXELS = ("smolvlm", "idefics3")


@pytest.mark.parametrize("name", [name for name in VISION_FAMILIES if name not in READ_PIXELS])
@torch.inference_mode()
def test_a_recorded_encoder_gives_the_features_of_other_pictures(name: str) -> None:
    family: Any = VISION_FAMILIES[name]
    model, first = family.built(), family.picture()
    tower, stages = tower_of(model)
    other = {**first, "pixel_values": first["pixel_values"].flip(-1) * 0.5}
    for inputs in (first, other, first):
        expected = rows(stages.encode_image(inputs))
        with tower.in_place():
            found = rows(stages.encode_image(inputs)).clone()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert tower.is_ready(inputs)


@torch.inference_mode()
def test_the_same_shape_in_other_rows_and_columns_is_another_graph() -> None:
    family: Any = VISION_FAMILIES["qwen2_5_vl"]
    model, inputs = family.built(), family.picture()
    tower, stages = tower_of(model)
    with tower.in_place():
        stages.encode_image(inputs)
    turned = {**inputs, "image_grid_thw": inputs["image_grid_thw"][:, [0, 2, 1]]}
    if torch.equal(turned["image_grid_thw"], inputs["image_grid_thw"]):
        pytest.fail("the picture of this test must not be a square")
    assert not tower.is_ready(turned)
    with tower.in_place():
        found = rows(stages.encode_image(turned)).clone()
    torch.testing.assert_close(found, rows(stages.encode_image(turned)), rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_an_encoder_that_looks_at_pixels_stays_with_the_modules() -> None:
    family: Any = VISION_FAMILIES["smolvlm"]
    tower, stages = tower_of(family.built())
    with pytest.raises(ConfigurationError, match="encoder of pictures: it cannot be captured"), tower.in_place():
        stages.encode_image(family.picture())
    assert not tower.is_ready(family.picture())


def test_a_prompt_without_a_picture_needs_no_graph() -> None:
    tower, _ = tower_of(VISION_FAMILIES["qwen2_5_vl"].built(), Reruns())
    assert tower.is_ready({"input_ids": torch.ones(1, 3, dtype=torch.long)})
