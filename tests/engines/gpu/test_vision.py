"""The captured vision stage gives the modules' features; crops are cut as the patch embedding reads them."""

from dataclasses import dataclass

import pytest
import torch

from experiment_core_utils.engines.gpu.vision import (
    GraphedVision,
    cut_patches,
    real_crops,
)
from experiment_core_utils.engines.weights import VisionWeights
from experiment_core_utils.models.molmoe import MolmoeForConditionalGeneration
from experiment_core_utils.models.molmoe.fused_weights import fuse_vision_weights
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.conftest import tiny_config

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model_on(device: str) -> MolmoeForConditionalGeneration:
    torch.manual_seed(7)
    model = MolmoeForConditionalGeneration(tiny_config()).eval()
    with torch.no_grad():
        model.model.connector.pad_embed.normal_()
    return model.to(device)


def test_cut_patches_times_the_weights_are_the_convolution() -> None:
    pixels, weight = torch.randn(2, 3, 28, 28), torch.randn(5, 3, 14, 14)
    cut = cut_patches(pixels, 14).reshape(2 * 4, 588)
    expected = torch.nn.functional.conv2d(pixels, weight, stride=14).flatten(2).transpose(1, 2).reshape(8, 5)
    torch.testing.assert_close(cut @ weight.flatten(1).t(), expected, rtol=1e-4, atol=1e-4)


def test_a_crop_is_padding_where_all_its_pixels_are() -> None:
    """Three crops of two patches with two pixels each; the third column is filling and says nothing."""
    patches = torch.tensor([[-1.0, -1, 0], [-1, -1, 0], [-1, -1, 0], [-1, 0.5, 0], [2, 3, 0], [4, 5, 0]])
    assert real_crops(patches, 3, pixels=2, pad_value=-1.0).tolist() == [False, True, True]


def test_without_a_gpu_the_reason_says_so() -> None:
    vision = fuse_vision_weights(model_on("cpu"))
    output = "^the vision tower cannot be captured: its weights are on cpu, not on a CUDA device$"
    with pytest.raises(ConfigurationError, match=output):
        GraphedVision(vision)


@dataclass(frozen=True)
class OnAGpu(VisionWeights):
    """Weights that say they are on one."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_torch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    output = "captured: its kernels are for CUDA, and this torch is built for ROCm 6.4.0$"
    with pytest.raises(ConfigurationError, match=output):
        GraphedVision(OnAGpu(**vars(fuse_vision_weights(model_on("cpu")))))


@needs_a_gpu
@pytest.mark.parametrize("crops", [1, 3])
def test_features_are_those_of_the_modules(crops: int) -> None:
    torch.backends.cudnn.allow_tf32 = False
    model = model_on("cuda")
    engine = GraphedVision(fuse_vision_weights(model))
    engine.warm_up(crops)
    for seed in range(2):
        torch.manual_seed(seed)
        pixels, masks = torch.randn(crops, 3, 336, 336, device="cuda"), torch.ones(crops, 576, device="cuda")
        masks[0, :24], masks[0, 24:48] = 0.0, 0.5
        if seed:
            pixels[-1] = -1.0
        places = torch.zeros(1, crops, model.config.features_per_crop, dtype=torch.long, device="cuda")
        with torch.inference_mode():
            wanted = model.encode_image(pixels[None], masks[None], places).pooler_output[0]
        torch.testing.assert_close(engine.encode(pixels, masks), wanted, rtol=1e-4, atol=1e-4)
        # The next picture finds nothing captured.
        engine.release()
