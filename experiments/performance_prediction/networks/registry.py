"""The networks by name, built with random weights in evaluation mode."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from experiment_core_utils.primitives.errors import ConfigurationError
from experiments.performance_prediction.networks import cnns
from experiments.performance_prediction.networks.sampled_layers import SampledLayers


@dataclass(frozen=True)
class CnnModel:
    """A network by its published name."""

    build: Callable[[], nn.Module]  #: makes it
    smallest_input: int  #: the side of the smallest square input that leaves something to pool


MODELS: Mapping[str, CnnModel] = {
    "vgg16": CnnModel(cnns.Vgg16, 32),
    "densenet121": CnnModel(cnns.DenseNet121, 29),
    "resnet152": CnnModel(lambda: cnns.ResNet((3, 8, 36, 3)), 1),
    "googlenet": CnnModel(cnns.GoogLeNet, 15),
    "alexnet": CnnModel(cnns.AlexNet, 63),
    "resnet50": CnnModel(lambda: cnns.ResNet((3, 4, 6, 3)), 1),
    "mobilenet_v2": CnnModel(cnns.MobileNetV2, 1),
    "unet": CnnModel(cnns.UNet, 16),
}
# Layers for training a predictor; `--model all` leaves them out, and no fold is judged on them.
LAYER_SETS: Mapping[str, CnnModel] = {"sampled_layers": CnnModel(SampledLayers, 1)}


def model_named(name: str) -> CnnModel:
    """The network of this name; raises ConfigurationError for a name that is in neither mapping."""
    known = {**MODELS, **LAYER_SETS}
    if name not in known:
        raise ConfigurationError(f"no model {name!r}; there are: {', '.join(known)}")
    return known[name]


def build_model(name: str, seed: int = 0) -> nn.Module:
    """The network on the CPU in evaluation mode, weights drawn from `seed`; torch's global generator is left alone.

    Convolutions are drawn as He et al. do, so that signals keep their size through the network. A batch normalisation
    that ends a residual branch starts at 0.25 in place of 1: with statistics that were never trained, each of fifty
    branches would else double the signal, beyond the range of 16 bits.

    Raises:
        ConfigurationError: no such network.
    """
    wanted = model_named(name)
    with torch.device("meta"):
        model = wanted.build()
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        for label, module in model.named_modules():
            _draw(label, module)
    return model.eval()


def _draw(label: str, module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.uniform_(module.bias, -0.1, 0.1)
    elif isinstance(module, nn.Linear | nn.BatchNorm2d):
        module.reset_parameters()
    if isinstance(module, nn.BatchNorm2d) and label.endswith("bn3"):
        nn.init.constant_(module.weight, 0.25)
