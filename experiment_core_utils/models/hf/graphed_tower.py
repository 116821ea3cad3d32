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
from transformers import PreTrainedModel

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.models.hf.engine_tower import ProvenTower
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.visual_token_keep import ENCODER, PictureEncoder
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, described
from experiment_core_utils.primitives.private_apis import flattened, unflattened


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
        sizes = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and not _is_pixels(leaf)]
        try:
            with out_of_memory_named():
                replay = self._graph_capturer.capture(lambda: plain(**unflattened(inputs, layout)), sizes)
        except (ConfigurationError, *LIBRARY_ERRORS) as error:
            reason = str(error) if isinstance(error, ConfigurationError) else described(error)
            raise ConfigurationError(f"the encoder of pictures: {reason}") from error
        return _GraphedPictures(pixels, replay)


def _is_pixels(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
