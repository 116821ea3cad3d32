"""In: the layers of a network and an inference; out: the time of each layer, from a pass that times nothing else."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import nn

from experiment_core_utils.primitives.device import HostMarks, Marks, new_marks, synchronize
from experiments.performance_prediction.profile_records import LayerPass

# By how much more than the host needed to queue an inference the GPU is kept busy before it.
_AHEAD = 1.5
_BALLAST_SIDE = 2048
_PRODUCTS_TIMED = 10
_MOST_PRODUCTS = 400


class CUDALayerTimer:
    """Times layers by a mark before and behind each: CUDA events on a GPU, the host's clock on the CPU.

    On a GPU the marks tell of the device alone: it is kept busy with products until the host has queued the whole
    inference, so that a gap in which it waits for the host is in no layer's time.

    Args:
        layers: modules of the network by name; none lies within another.
        device: where they compute.
    """

    def __init__(self, layers: Mapping[str, nn.Module], device: torch.device) -> None:
        self._layers = dict(layers)
        self._device = device
        self._marks: Marks = new_marks(device)
        self._called: list[str] = []

    def time(self, inference: Callable[[], object], repeats: int) -> LayerPass:
        """The pass: that many inferences, after one that is not timed; the hooks are gone when it returns."""
        totals: list[float] = []
        layers: dict[str, list[float]] = defaultdict(list)
        with self._hooked():
            keep_busy = self._ballast(inference)
            for _ in range(repeats):
                total_s, calls = self._once(inference, keep_busy)
                totals.append(total_s)
                for name, seconds in calls.items():
                    layers[name].append(seconds)
        return LayerPass(tuple(totals), {name: tuple(seconds) for name, seconds in layers.items()})

    def _once(self, inference: Callable[[], object], keep_busy: Callable[[], None]) -> tuple[float, dict[str, float]]:
        synchronize(self._device)
        self._marks, self._called = new_marks(self._device), []
        keep_busy()
        self._marks.mark()
        inference()
        self._marks.mark()
        spans = self._marks.seconds()
        return sum(spans), seconds_of_layers(self._called, spans)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self._layers.items():
                handles.append(module.register_forward_pre_hook(self._before(name)))
                handles.append(module.register_forward_hook(self._after_layer))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str) -> Callable[[nn.Module, Any], None]:
        def mark(_module: nn.Module, _inputs: Any) -> None:
            self._called.append(name)
            self._marks.mark()

        return mark

    def _after_layer(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._marks.mark()

    def _ballast(self, inference: Callable[[], object]) -> Callable[[], None]:
        """Work for a GPU that lasts longer than the host needs to queue an inference; none for the CPU."""
        host = HostMarks()
        host.mark()
        inference()
        host.mark()
        synchronize(self._device)
        if self._device.type != "cuda":
            return _nothing
        factor = torch.zeros(_BALLAST_SIDE, _BALLAST_SIDE, device=self._device)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)
        synchronize(self._device)
        marks = new_marks(self._device)
        marks.mark()
        for _ in range(_PRODUCTS_TIMED):
            torch.mm(factor, factor, out=product)
        marks.mark()
        product_s = marks.seconds()[0] / _PRODUCTS_TIMED
        count = min(ceil(_AHEAD * host.seconds()[0] / product_s), _MOST_PRODUCTS)

        def keep_busy() -> None:
            for _ in range(count):
                torch.mm(factor, factor, out=product)

        return keep_busy


def seconds_of_layers(called: Sequence[str], spans: Sequence[float]) -> dict[str, float]:
    """Seconds of each layer, of all its calls together.

    Args:
        called: layers in the order of their calls.
        spans: between the marks: before the first call, the call, up to the next, the call, …, behind the last.
    """
    layers: dict[str, float] = defaultdict(float)
    for name, seconds in zip(called, spans[1::2], strict=True):
        layers[name] += seconds
    return dict(layers)


def _nothing() -> None:
    """The host computes itself: there is no queue to fill."""
