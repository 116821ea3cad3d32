"""The straight vision stage gives the modules' features, also where crops or patches are padding."""

import pytest
import torch

from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.straight_vision import StraightVision
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config

CROPS, PATCHES = 3, 576


@pytest.fixture(scope="module")
def model() -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    built = MolmoeForConditionalGeneration(tiny_config()).eval()
    with torch.no_grad():
        built.model.connector.pad_embed.normal_()
    return built


def pictures(padding_crop: bool, padding_patches: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    pixels, masks = torch.randn(CROPS, 3, 336, 336), torch.ones(CROPS, PATCHES)
    # A crop with one dark row is no padding.
    pixels[0, 0, 0] = -1.0
    if padding_crop:
        pixels[2] = -1.0
    if padding_patches:
        masks[1, :24] = 0.0
        masks[1, 24:48] = 0.5
    return pixels, masks


@pytest.mark.parametrize("padding_crop", [False, True])
@pytest.mark.parametrize("padding_patches", [False, True])
def test_features_are_those_of_the_modules(
    model: MolmoeForConditionalGeneration, padding_crop: bool, padding_patches: bool
) -> None:
    pixels, masks = pictures(padding_crop, padding_patches)
    places = torch.zeros(1, CROPS, model.config.features_per_crop, dtype=torch.long)
    with torch.inference_mode():
        expected = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
    found = StraightVision(model).encode(pixels, masks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_unused_last_block_is_left_out() -> None:
    config = tiny_config()
    config.vision_feature_layers = (-2, -2)
    assert len(StraightVision(MolmoeForConditionalGeneration(config).eval())._blocks) == 1


def test_joined_weights_and_biases_are_the_modules_own() -> None:
    """The tower is 16 wide: what is changed in a module, changes the features."""
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    pixels, masks = pictures(False, False)
    straight = StraightVision(model)
    places = torch.zeros(1, CROPS, model.config.features_per_crop, dtype=torch.long)
    with torch.no_grad():
        model.model.vision_tower.layers[0].self_attn.v_proj.bias += 1.0
        model.model.vision_tower.layers[0].self_attn.q_proj.weight *= 3.0
    with torch.inference_mode():
        expected = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
    torch.testing.assert_close(straight.encode(pixels, masks), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_two_dtypes_are_refused() -> None:
    model = MolmoeForConditionalGeneration(tiny_config())
    model.model.vision_tower.layers[1].mlp.fc2.half()
    with pytest.raises(ConfigurationError, match=r"in several dtypes \(float16, float32\)"):
        StraightVision(model)


def test_another_activation_is_refused() -> None:
    config = tiny_config()
    config.vision_config.hidden_act = "gelu"
    with pytest.raises(ConfigurationError, match="activation is gelu"):
        StraightVision(MolmoeForConditionalGeneration(config))
