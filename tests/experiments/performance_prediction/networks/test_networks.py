"""The networks against what is published of them: parameters, names and shapes of the state, convolutions."""

import hashlib

import pytest
import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.algorithms.support import conv_shapes
from experiments.performance_prediction.networks.registry import MODELS, build_model, model_named

# Parameters as published; the digest is over the names and shapes of the state in its order, torchvision 0.28's own but
# for the last two.
PUBLISHED = {
    "vgg16": (138_357_544, "8a41c838cadbc3e0"),
    "alexnet": (61_100_840, "23c3b8d4a3e86dc8"),
    "resnet50": (25_557_032, "614cd53ddf849669"),
    "resnet152": (60_192_808, "9ce3831312550858"),
    "densenet121": (7_978_856, "08ed4bd108558638"),
    "googlenet": (6_624_904, "3cf031916e017580"),
    "mobilenet_v2": (3_504_872, "a18c560d82f6d01d"),
    # By hand: two 3x3 convolutions with bias a level, from the channels of two levels on the way up, and one of 1x1.
    "unet": (7_846_690, "1a4949e7f0d8c4af"),
}
# Convolutions: all, with stride 1, 3x3 with stride 1, 1x1.
CONVOLUTIONS = {
    "vgg16": (13, 13, 13, 0),
    "alexnet": (5, 4, 3, 0),
    "googlenet": (57, 56, 19, 37),
    "resnet50": (53, 46, 13, 36),
    "resnet152": (155, 148, 47, 104),
    "densenet121": (120, 119, 58, 61),
    "mobilenet_v2": (52, 47, 13, 34),
    "unet": (19, 19, 18, 1),
}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return model_named(name).build()


def test_parameters_names_and_shapes(name: str) -> None:
    model = on_meta(name)
    state = "\n".join(f"{key} {list(tensor.shape)}" for key, tensor in model.state_dict().items())
    digest = hashlib.sha256(state.encode()).hexdigest()[:16]
    assert (sum(each.numel() for each in model.parameters()), digest) == PUBLISHED[name]


def test_convolutions(name: str) -> None:
    shapes = list(conv_shapes(on_meta(name), (1, 3, 224, 224)).values())
    strided = [shape for shape in shapes if shape.stride == (1, 1)]
    threes = [shape for shape in strided if shape.kernel == (3, 3)]
    ones = [shape for shape in shapes if shape.kernel == (1, 1)]
    assert (len(shapes), len(strided), len(threes), len(ones)) == CONVOLUTIONS[name]


def test_flops_of_vgg16_by_hand() -> None:
    # Multiply-adds at 224 pixels: output pixels times 9 times channels in and out.
    stages = [(224, [(3, 64), (64, 64)]), (112, [(64, 128), (128, 128)]), (56, [(128, 256), (256, 256), (256, 256)]),
              (28, [(256, 512), (512, 512), (512, 512)]), (14, [(512, 512)] * 3)]  # fmt: skip
    products = sum(side * side * 9 * a * b for side, pairs in stages for a, b in pairs)
    assert sum(shape.flops for shape in conv_shapes(on_meta("vgg16"), (1, 3, 224, 224)).values()) == 2 * products


def test_the_smallest_input_is_the_smallest(name: str) -> None:
    model, side = on_meta(name).eval(), MODELS[name].smallest_input
    assert conv_shapes(model, (1, 3, side, side))
    if side > 1:
        with pytest.raises(ConfigurationError):
            conv_shapes(model, (1, 3, side - 1, side - 1))


def test_random_weights_keep_the_signal_and_the_seed() -> None:
    state = torch.random.get_rng_state()
    model = build_model("resnet50")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    with torch.inference_mode():
        logits = model(torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (1, 1000) and 0.01 < float(logits.std()) < 100
    assert torch.equal(model.conv1.weight, build_model("resnet50").conv1.weight)  # type: ignore[union-attr, arg-type]
    assert not torch.equal(model.conv1.weight, build_model("resnet50", seed=1).conv1.weight)  # type: ignore[union-attr, arg-type]


def test_layers_of_random_sizes_have_the_same_sizes_each_time() -> None:
    model = build_model("sampled_layers")
    shapes = conv_shapes(model, (1, 3, 64, 64))
    assert len(shapes) == 240 and list(conv_shapes(on_meta("sampled_layers"), (1, 3, 64, 64)).values()) == list(
        shapes.values()
    )
    # A side is that of the picture divided by a power of two, or the kernel's; depthwise ones are among them.
    sides = {64, 32, 16, 8, 4, 2}
    assert all(each.height in sides or each.height == each.kernel[0] for each in shapes.values())
    assert {1, 3, 5, 7, 11} == {each.kernel[0] for each in shapes.values()}
    assert any(each.groups == each.in_channels > 1 for each in shapes.values())
    # 150 000 FLOPs a pixel of the picture are 7.5e9 at 224.
    assert 5e9 < max(each.flops for each in conv_shapes(model, (1, 3, 224, 224)).values()) <= 7.6e9


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="no model 'vgg19'; there are: vgg16, densenet121"):
        build_model("vgg19")
