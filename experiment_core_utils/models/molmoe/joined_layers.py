"""In: layers of a model; out: their weights and biases joined for one product, or what is against packing them."""

from collections.abc import Iterable

import torch
from torch import nn


def fusing_unsupported_reason(layers: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> str | None:
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


def fused_rows(layers: list[nn.Linear]) -> torch.Tensor:
    """The layers' weights one below the other; each layer's own becomes a view of its rows."""
    return _fused_views(layers, "weight")


def fused_biases(layers: list[nn.Linear]) -> torch.Tensor:
    """The layers' biases one after the other; each layer's own becomes a view of its part."""
    return _fused_views(layers, "bias")


@torch.inference_mode(False)
@torch.no_grad()
def _fused_views(layers: list[nn.Linear], name: str) -> torch.Tensor:
    joined = torch.cat([getattr(layer, name).detach() for layer in layers])
    parts = joined.split([layer.out_features for layer in layers])
    for layer, own in zip(layers, parts, strict=True):
        setattr(layer, name, nn.Parameter(own, requires_grad=getattr(layer, name).requires_grad))
    return joined
