"""In: a running network and an inference; out: each layer's distance from a float64 reference on its own input."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import OutOfMemory
from experiments.performance_prediction.numerical_error import relative_l2
from experiments.performance_prediction.profile_records import LayerError
from experiments.performance_prediction.running_network import RunningLayer


def layer_errors(layers: Mapping[str, RunningLayer], inference: Callable[[], object]) -> dict[str, LayerError]:
    """Numerical errors by layer, from one inference that is not timed.

    Each layer is judged on the input that it gets, errors of the layers before it included: they are not counted twice.
    """
    found: dict[str, LayerError] = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            handle = layer.module.register_forward_hook(partial(_note, found, name, layer))
            hooks.callback(handle.remove)
        inference()
    return found


def _note(
    found: dict[str, LayerError], name: str, layer: RunningLayer, _module: nn.Module, inputs: Any, output: Tensor
) -> None:
    found[name] = _error(layer, inputs[0], output)


def _error(layer: RunningLayer, given: Tensor, output: Tensor) -> LayerError:
    try:
        with out_of_memory_named():
            relative = relative_l2(output, layer.reference(given))
    except OutOfMemory as error:
        return LayerError(None, f"no memory for the float64 reference: {error}")
    if relative is None:
        return LayerError(None, "the reference is zero everywhere")
    if not math.isfinite(relative):
        return LayerError(None, "the output is not finite")
    return LayerError(relative, None)
