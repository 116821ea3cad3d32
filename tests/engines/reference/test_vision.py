"""The reference vision engine gives the modules' features, also where crops or patches are padding."""

import pytest
import torch

from experiment_core_utils.engines.cpu.vision import CpuVision
from experiment_core_utils.engines.reference.vision import ReferenceVision
from experiment_core_utils.engines.select import choose_engines
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.engine_model import MolmoeEngineModel
from experiment_core_utils.models.molmoe.fused_weights import fuse_decoder_weights, fused_vision_modules
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config
from tests.engines.cpu_compiler import needs_compiler

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
    # A crop with one dark row is not a padding.
    pixels[0, 0, 0] = -1.0
    if padding_crop:
        pixels[2] = -1.0
    if padding_patches:
        masks[1, :24] = 0.0
        masks[1, 24:48] = 0.5
    return pixels, masks


@pytest.fixture(scope="module")
def wide() -> MolmoeForConditionalGeneration:
    """With heads of 32, for which there are kernels; the same block's states twice, and those of another."""
    config = tiny_config()
    vision = config.vision_config
    vision.num_hidden_layers, vision.hidden_size, vision.num_attention_heads = 3, 64, 2
    config.vision_feature_layers = (-1, -3, -1)
    torch.manual_seed(7)
    built = MolmoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        built.model.connector.pad_embed.normal_()
        for name, bias in built.model.vision_tower.named_parameters():
            if name.endswith("bias"):
                bias.normal_(std=0.1)
    return built


@needs_compiler
def test_with_kernels_features_are_those_of_the_modules(wide: MolmoeForConditionalGeneration) -> None:
    """Requests of several sizes one after the other, in the same memory; what came out before stays as it was."""
    engine = choose_engines(MolmoeEngineModel(wide), fuse_decoder_weights(wide)).vision
    assert isinstance(engine, CpuVision)
    places = torch.zeros(1, CROPS, wide.config.features_per_crop, dtype=torch.long)
    results = []
    for crops, padding in ((2, False), (CROPS, True), (1, True)):
        pixels, masks = (each[:crops] for each in pictures(padding, padding))
        with torch.inference_mode():
            expected = wide.encode_image(pixels[None], masks[None], places[:, :crops]).pooler_output[0]
        results.append((engine.encode(pixels, masks), expected))
    for found, expected in results:
        # Of the largest feature the modules themselves are off by 2e-5 from float64.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("padding_crop", [False, True])
@pytest.mark.parametrize("padding_patches", [False, True])
def test_features_are_those_of_the_modules(
    model: MolmoeForConditionalGeneration, padding_crop: bool, padding_patches: bool
) -> None:
    pixels, masks = pictures(padding_crop, padding_patches)
    places = torch.zeros(1, CROPS, model.config.features_per_crop, dtype=torch.long)
    with torch.inference_mode():
        expected = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
    found = ReferenceVision(fused_vision_modules(model)).encode(pixels, masks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_unused_last_block_is_left_out() -> None:
    config = tiny_config()
    config.vision_feature_layers = (-2, -2)
    assert len(ReferenceVision(fused_vision_modules(MolmoeForConditionalGeneration(config).eval()))._blocks) == 1


def test_fused_weights_and_biases_are_the_modules_own() -> None:
    """The tower is 16 wide: what is changed in a module, changes the features."""
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    pixels, masks = pictures(False, False)
    reference = ReferenceVision(fused_vision_modules(model))
    places = torch.zeros(1, CROPS, model.config.features_per_crop, dtype=torch.long)
    with torch.no_grad():
        model.model.vision_tower.layers[0].self_attn.v_proj.bias += 1.0
        model.model.vision_tower.layers[0].self_attn.q_proj.weight *= 3.0
    with torch.inference_mode():
        expected = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
    torch.testing.assert_close(reference.encode(pixels, masks), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_two_dtypes_are_refused() -> None:
    model = MolmoeForConditionalGeneration(tiny_config())
    model.model.vision_tower.layers[1].mlp.fc2.half()
    with pytest.raises(ConfigurationError, match=r"in several dtypes \(float16, float32\)"):
        ReferenceVision(fused_vision_modules(model))


def test_another_activation_is_refused() -> None:
    config = tiny_config()
    config.vision_config.hidden_act = "gelu"
    with pytest.raises(ConfigurationError, match="activation is gelu"):
        ReferenceVision(fused_vision_modules(MolmoeForConditionalGeneration(config)))
