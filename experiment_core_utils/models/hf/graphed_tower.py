"""The vision stage of a transformers model as a CUDA graph, one for each shape of pictures.

What a tower computes from sizes alone (positions, masks, windows) is computed once, when a graph is made, and is a
constant of it: the host decides by it what to launch. Only what depends on pixels is in the graph.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.models.hf.engine_tower import ProvenTower
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.visual_token_keep import ENCODER, PictureEncoder
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, described
from experiment_core_utils.primitives.private_apis import flattened, unflattened

_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)
_TO_HOST = (
    torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
)  # fmt: skip


@dataclass
class _GraphedPictures:
    pixels: list[torch.Tensor]
    replay: Callable[[], Any]


class GraphedTower(ProvenTower):
    """The base model's encoder of pictures, captured for each shape and each value of what is not pixels.

    Args:
        model: with a method that encodes pictures by itself.
        vision_setting: the value of the vision knob in force, which may change what the encoder does.
        host_copy: of a tensor on the device, the same values on the host.
        most: graphs kept; each has its own pixels and features, the memory between is common to all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        graph_capturer: GraphCapturer,
        vision_setting: Callable[[], Hashable],
        host_copy: Callable[[torch.Tensor], torch.Tensor],
        most: int = 64,
    ) -> None:
        super().__init__(model)
        self._graph_capturer = graph_capturer
        self._vision_setting, self._host_copy = vision_setting, host_copy
        self._graphs: OrderedDict[Hashable, _GraphedPictures] = OrderedDict()
        self._most = most
        self._encoder = PictureEncoder(model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which graphs encode pictures; those of a new shape are captured.

        Raises:
            ConfigurationError: they cannot be captured; the message is the reason.
        """
        base: Any = self._model.base_model
        plain = getattr(base, ENCODER)

        def encode(**given: Any) -> Any:
            return self._encode(plain, given)

        with replaced_method(base, ENCODER, encode):
            yield

    def is_ready(self, inputs: Mapping[str, Any]) -> bool:
        given = self._encoder.given(inputs)
        return given is None or self._key(given) in self._graphs

    def release(self) -> None:
        self._graphs.clear()

    def _encode(self, plain: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        leaves, layout = flattened(dict(given))
        key = self._key(given)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(plain, leaves, layout)
            while len(self._graphs) > self._most:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        for own, leaf in zip(graph.pixels, filter(_is_pixels, leaves), strict=True):
            own.copy_(leaf)
        return graph.replay()

    def _key(self, given: Mapping[str, Any]) -> Hashable:
        leaves, layout = flattened(dict(given))
        return self._vision_setting(), str(layout), tuple(map(self._kind, leaves))

    def _kind(self, leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        values = b"" if _is_pixels(leaf) else self._host_copy(leaf).cpu().numpy().tobytes()
        return tuple(leaf.shape), leaf.dtype, values

    def _capture(self, plain: Callable[..., Any], leaves: list[Any], layout: Any) -> _GraphedPictures:
        inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        pixels = [leaf for leaf in inputs if _is_pixels(leaf)]
        sizes = SizeConstants(pixels, self._model)

        def work() -> Any:
            with sizes.of_pass():
                return plain(**unflattened(inputs, layout))

        try:
            # What code keeps after its first call is no longer computed in the passes that are compared.
            plain(**unflattened(inputs, layout))
            replay = self._graph_capturer.capture(work)
        except LIBRARY_ERRORS as error:
            raise ConfigurationError(f"the encoder of pictures cannot be captured ({described(error)})") from error
        return _GraphedPictures(pixels, replay)


def _is_pixels(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


class SizeConstants:
    """What passes of the same work compute from neither pixels nor weights: the first pass remembers it, later ones are
    given it, so that they need not wait for a device to know sizes.

    Args:
        pixels: tensors whose values differ from one request to another.
        model: whose weights are not remembered in another form.
    """

    def __init__(self, pixels: list[torch.Tensor], model: torch.nn.Module) -> None:
        self._variable = [*pixels, *model.parameters(), *model.buffers()]
        self._remembered: list[Any] | None = None

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """A context for one pass.

        Raises:
            ConfigurationError: a pass does other work than the first one, or changes in place what was remembered.
        """
        given = self._remembered
        passing = _Pass(self._variable, given)
        with _AcrossHost(passing), passing:
            yield
        if given is None:
            self._remembered = passing.results
        elif passing.position != len(given):
            raise ConfigurationError("the work on sizes is not the same in each pass")


class _Pass(TorchDispatchMode):
    """One pass; operators on sizes alone are remembered, or answered by what was remembered."""

    def __init__(self, variable: list[torch.Tensor], given: list[Any] | None) -> None:
        super().__init__()
        self._variable: Any = WeakIdKeyDictionary(dict.fromkeys(variable, True))
        #: memory that holds what depends on pixels or weights, or what is written in place
        self._written: dict[int, torch.Tensor] = {}
        self._kept: set[int] = set()  #: the memory of what was remembered in this pass
        self._given = given
        self.results: list[Any] = []
        self._is_computing = False
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_computing:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in flattened((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        is_variable = any(map(self.varies, tensors))
        if func._schema.is_mutable:
            return self._written_in_place(func(*args, **kwargs), tensors, is_variable)
        if is_variable or not tensors:
            result = func(*args, **kwargs)
            if is_variable:
                self._vary(result)
            return result
        return self.remembered(lambda: func(*args, **kwargs))

    def remembered(self, compute: Callable[[], Any]) -> Any:
        """The result of the first pass, computed in that one."""
        if self._given is None:
            self._is_computing = True
            try:
                self.results.append(compute())
            finally:
                self._is_computing = False
            kept = [leaf for leaf in flattened(self.results[-1])[0] if isinstance(leaf, torch.Tensor)]
            self._kept.update(map(_memory, kept))
            return self.results[-1]
        if self.position == len(self._given):
            raise ConfigurationError("the work on sizes is not the same in each pass")
        self.position += 1
        return self._given[self.position - 1]

    def varies(self, tensor: torch.Tensor) -> bool:
        """Whether its values depend on pixels or weights, or are written in place."""
        return tensor in self._variable or (tensor.device.type != "meta" and _memory(tensor) in self._written)

    def _vary(self, result: Any) -> None:
        for leaf in flattened(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self._variable[leaf] = True

    def _written_in_place(self, result: Any, tensors: list[torch.Tensor], is_variable: bool) -> Any:
        """What is written in place is computed anew in each pass, and whatever comes from it, too."""
        target = tensors[0]
        if _memory(target) in self._kept:
            raise ConfigurationError("what depends on sizes alone is changed in place")
        self._written.setdefault(_memory(target), target)
        if is_variable:
            self._vary(result)
        return result


class _AcrossHost(TorchFunctionMode):
    """What goes to the host or comes from it cannot be part of a graph, and is remembered where pixels have no part."""

    def __init__(self, passing: _Pass) -> None:
        super().__init__()
        self._passing = passing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in flattened((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        crosses = func in _TO_HOST or (func in _FROM_HOST and not tensors)
        if crosses and not any(map(self._passing.varies, tensors)):
            return self._passing.remembered(lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
