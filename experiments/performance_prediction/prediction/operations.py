"""The convolutions and other operations of a network at an input size, found without computing any."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from experiment_core_utils.primitives.private_apis import flattened
from experiments.performance_prediction.algorithms.convolution import ConvShape
from experiments.performance_prediction.algorithms.support import conv_shapes
from experiments.performance_prediction.networks.registry import model_named

# Bytes are counted as in float32 for every precision; a fit does not depend on that.
FLOAT32_BYTES = 4
# Operators that only look at memory in another way, or that convolutions are counted by.
_FREE = frozenset({"view", "_unsafe_view", "t", "transpose", "permute", "empty", "detach", "as_strided", "alias"})
_CONVOLUTION, _PRODUCT = "convolution", "addmm"


@dataclass(frozen=True)
class NetworkOperations:
    """The operations of one forward pass."""

    convolutions: Mapping[str, ConvShape]  #: by layer in the order of their calls
    others: int  #: operations that are none: normalisation, activation, pooling, sums, products
    other_bytes: int  #: what those read and write, as in float32, without the fully connected layers
    product_bytes: int  #: of the fully connected layers, weights above all


@cache
def network_operations(model: str, input_size: int, batch_size: int) -> NetworkOperations:
    """The operations of a network; raises ConfigurationError for an unknown network, or an input too small for it."""
    with torch.device("meta"):
        network = model_named(model).build().eval()
    given = (batch_size, 3, input_size, input_size)
    with _Traffic() as traffic:
        convolutions = conv_shapes(network, given)
    return NetworkOperations(convolutions, traffic.others, traffic.other_bytes, traffic.product_bytes)


class _Traffic(TorchDispatchMode):
    """Counts operators and the bytes of their tensors while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.others = self.other_bytes = self.product_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE and name != _CONVOLUTION:
            tensors = [leaf for leaf in flattened((args, kwargs, result))[0] if isinstance(leaf, Tensor)]
            moved = FLOAT32_BYTES * sum(math.prod(tensor.shape) for tensor in tensors)
            self.others += 1
            if name == _PRODUCT:
                self.product_bytes += moved
            else:
                self.other_bytes += moved
        return result
