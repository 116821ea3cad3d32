"""In: the layers of a running network; out: the kernels that each runs on a GPU, which prove the algorithm."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from experiments.performance_prediction.convolution import ConvShape
from experiments.performance_prediction.cpu_algorithms import torch_choice
from experiments.performance_prediction.kernel_names import kernel_names_of_each
from experiments.performance_prediction.layer_swap import AlgorithmConv2d
from experiments.performance_prediction.running_network import RunningLayer


def layer_kernels(layers: Mapping[str, RunningLayer], device: torch.device) -> dict[str, tuple[str, ...]] | None:
    """Kernels by layer, without those of the bias; None where they are not known. Layers of one shape are looked at
    once.
    """
    first: dict[ConvShape, RunningLayer] = {}
    for layer in layers.values():
        first.setdefault(layer.shape, layer)
    found = kernel_names_of_each([partial(_convolve, layer) for layer in first.values()], device)
    if found is None:
        return None
    by_shape = dict(zip(first, found, strict=True))
    return {name: by_shape[layer.shape] for name, layer in layers.items()}


def _convolve(layer: RunningLayer) -> Tensor:
    weight = layer.convolution.weight
    given = torch.empty(layer.shape.input_shape, dtype=weight.dtype, device=weight.device)
    if isinstance(layer.module, AlgorithmConv2d):
        return layer.module.prepared.run(given, weight)
    return torch_choice(given, weight, layer.shape)
