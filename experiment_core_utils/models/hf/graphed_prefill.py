"""CUDA graphs of a transformers decoder over a prompt, one for each shape of its inputs.

The work around the decoder (embedding, placing of picture features, head) runs eagerly, in a few launches.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from experiment_core_utils.engines.cuda_graphs import GraphCapturer
from experiment_core_utils.engines.engine_proof import RouterTrace
from experiment_core_utils.models.hf.generate import cache_argument
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.primitives.device import out_of_memory_named
from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, ConfigurationError, described
from experiment_core_utils.primitives.private_apis import flattened, unflattened


@dataclass
class _GraphedShape:
    inputs: list[Any]
    replay: Callable[[], Any]
    trace: RouterTrace


class GraphedDecoder:
    """A decoder's `forward` without a filled cache, at the setting in force when this was made.

    Args:
        num_experts: that routers choose from; None without experts.
        most: graphs kept; each has its own inputs and outputs, the memory between is common to all.

    Attributes:
        replays: how often a graph was replayed.
        chosen_experts: ids [T, k] that each choice of the last replay made, until the next replay of any graph.
    """

    is_engine = False

    def __init__(
        self, model: PreTrainedModel, graph_capturer: GraphCapturer, num_experts: int | None = None, most: int = 64
    ) -> None:
        self._model: Any = model
        self._cache = cache_argument(model)
        decoder: Any = model.get_decoder()
        # Some call another part of theirs their decoder.
        takes_cache = self._cache in inspect.signature(decoder.forward).parameters
        self._decoder: Any = decoder if takes_cache else model.base_model
        self._graph_capturer = graph_capturer
        self._graphs: dict[Hashable, _GraphedShape] = {}
        self._most = most
        self._captures_new = False
        self._served: list[Hashable] = []
        self.replays = 0
        self._num_experts = num_experts
        self.chosen_experts: tuple[torch.Tensor, ...] = ()

    def has_graphs(self, names: Iterable[Hashable]) -> bool:
        """Whether all graphs with these names, as `in_place` gives them, still exist."""
        return all(name in self._graphs for name in names)

    @contextmanager
    def in_place(self, captures_new: bool = False) -> Iterator[Sequence[Hashable]]:
        """A context in which the decoder replays the graph for its inputs, where there is one; else it runs eagerly, or
        is captured first.

        Yields the names of the graphs that are replayed, as they are.

        Raises:
            ConfigurationError: with `captures_new`, the decoder cannot be captured; the message is the reason.
        """
        plain = self._decoder.forward

        names = list(inspect.signature(plain).parameters)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(plain, {**dict(zip(names, args, strict=False)), **kwargs})

        self._captures_new, self._served = captures_new, []
        with replaced_method(self._decoder, "forward", forward):
            yield self._served

    def _forward(self, plain: Any, kwargs: dict[str, Any]) -> Any:
        given = {name: value for name, value in kwargs.items() if name != self._cache}
        leaves, layout = flattened(given)
        key = (str(layout), tuple(map(_kind, leaves)))
        graph = self._graphs.pop(key, None)
        if graph is None:
            if not self._captures_new:
                return plain(**kwargs)
            graph = self._capture(plain, leaves, layout)
        else:
            for own, leaf in zip(graph.inputs, leaves, strict=True):
                if isinstance(leaf, torch.Tensor):
                    own.copy_(leaf)
            self.replays += 1
        self._graphs[key] = graph
        self._served.append(key)
        while len(self._graphs) > self._most:
            del self._graphs[next(iter(self._graphs))]
        output = graph.replay()
        self.chosen_experts = tuple(graph.trace.chosen)
        return output

    def _capture(self, plain: Any, leaves: list[Any], layout: Any) -> _GraphedShape:
        inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        config = self._model.config.get_text_config(decoder=True)
        trace = RouterTrace(self._num_experts)

        def work() -> Any:
            with trace.of_pass():
                return plain(**unflattened(inputs, layout), **{self._cache: DynamicCache(config=config)})

        try:
            with out_of_memory_named():
                return _GraphedShape(inputs, self._graph_capturer.capture(work), trace)
        except LIBRARY_ERRORS as error:
            raise ConfigurationError(f"its decoder does not run as a graph needs it ({described(error)})") from error


def _kind(leaf: Any) -> Any:
    """The properties of an input that must be the same for a graph to fit it."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
