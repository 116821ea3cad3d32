"""In: layers of a model; out: their weights and biases joined for one product, or what is against packing them."""

from collections.abc import Iterable

import torch
from torch import nn


def packing_problem(layers: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> str | None:
    """Why weights cannot be packed, to follow on "cannot be packed: "; None where they can.

    Args:
        layers: what has to be a plain `nn.Linear`.
        weights: all that is packed, of layers and of anything else.
    """
    weights = list(weights)
    if any(type(layer) is not nn.Linear for layer in layers) or not all(map(torch.is_floating_point, weights)):
        return "its weights are quantised"
    devices = sorted({str(weight.device) for weight in weights})
    if len(devices) > 1:
        return f"its weights are on several devices ({', '.join(devices)})"
    if devices == ["meta"]:
        return "its weights are not loaded"
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    return f"its weights are in several dtypes ({', '.join(dtypes)})" if len(dtypes) > 1 else None


@torch.inference_mode(False)
@torch.no_grad()
def joined_rows(layers: list[nn.Linear]) -> torch.Tensor:
    """The layers' weights one below the other; each layer's own becomes a view of its rows."""
    joined = torch.cat([layer.weight.detach() for layer in layers])
    rows = joined.split([layer.out_features for layer in layers])
    for layer, own in zip(layers, rows, strict=True):
        layer.weight = nn.Parameter(own, requires_grad=layer.weight.requires_grad)
    return joined


@torch.inference_mode(False)
@torch.no_grad()
def joined_biases(layers: list[nn.Linear]) -> torch.Tensor:
    """The layers' biases one after the other; each layer's own becomes a view of its part."""
    joined = torch.cat([layer.bias.detach() for layer in layers])
    parts = joined.split([layer.out_features for layer in layers])
    for layer, own in zip(layers, parts, strict=True):
        layer.bias = nn.Parameter(own, requires_grad=layer.bias.requires_grad)
    return joined
