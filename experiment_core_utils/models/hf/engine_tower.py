"""The vision stage of a transformers model whose tower's blocks run by kernels.

Embeddings, and what makes features of the blocks' states, stay with the modules, also what notes the states after each
block. The kernels take the place of each block's `forward`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from experiment_core_utils.engines.cuda_graphs import engine_refused
from experiment_core_utils.engines.engine_proof import refuse_other_features
from experiment_core_utils.models.common.judging import judging
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.tower_description import described_tower
from experiment_core_utils.primitives.errors import ConfigurationError, EngineRefused

# What a block may be given beside states and mask; it does not change what the block computes.
_KNOWN = frozenset(("output_hidden_states", "return_dict", "image_sizes"))


class ProvenTower:
    """What encodes pictures in place of a model's modules, proven by these.

    Args:
        model: with the tower.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._judged: set[Hashable] = set()

    def in_place(self) -> AbstractContextManager[None]:
        """A context in which pictures are encoded so.

        Raises:
            ConfigurationError: these pictures cannot be; the message is the reason.
        """
        raise NotImplementedError

    def is_ready(self, inputs: Mapping[str, Any]) -> bool:
        """Whether nothing is left to prepare for the pictures of a request."""
        return True

    def release(self) -> None:
        """Give back what was prepared."""

    def prove(self, name: str, inputs: Mapping[str, Any], encode: Callable[[], Any], features: Any) -> None:
        """Judge features beside those of the modules, by the modules in higher precision, once for pictures of a size
        with or without masked patches.

        Args:
            name: of the engine, for messages.
            encode: makes the features of the request by the modules.
            features: what the kernels made.

        Raises:
            EngineRefused: the features are others.
        """
        pictures = frozenset(
            (key, tuple(each.shape), bool(each.all())) if "mask" in key else (key, tuple(each.shape))
            for key, each in inputs.items()
            if each.is_floating_point() or key.startswith("pixel")
        )
        if features is None or pictures in self._judged:
            return
        modules, dtype = _rows(encode()), self._model.dtype
        try:
            with judging(self._model, dtype):
                exact = _rows(encode())
            refuse_other_features(name, _rows(features), modules, exact, dtype)
        except EngineRefused as error:
            raise engine_refused(str(error)) from error
        self._judged.add(pictures)


class EngineTower(ProvenTower):
    """The kernels of a model's tower.

    Args:
        model: in float32 on the CPU.

    Raises:
        ConfigurationError: its tower is not of the form that engines compute, or no kernel runs it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._layers, self._engine = described_tower(model)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the kernels run the tower's blocks.

        Raises:
            ConfigurationError: a block is given what the kernels do not know.
        """
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                stack.enter_context(replaced_method(layer, "forward", partial(self._forward, index)))
            yield

    def _forward(
        self, index: int, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **given: Any
    ) -> torch.Tensor:
        unknown = sorted(name for name in given.keys() - _KNOWN if given[name] is not None and given[name] is not False)
        if unknown:
            raise ConfigurationError(f"blocks of the vision tower are given {', '.join(unknown)}, which engines lack")
        hides = attention_mask is not None and not bool(_sees_all(attention_mask))
        # The caller may keep what went in.
        states = hidden_states.detach().clone(memory_format=torch.contiguous_format)
        self._engine.advance(index, states, attention_mask if hides else None)
        return states


def _sees_all(mask: torch.Tensor) -> torch.Tensor:
    """Whether a mask, of booleans or what is added to scores, hides nothing."""
    return mask.all() if mask.dtype == torch.bool else (mask == 0).all()


def _rows(features: Any) -> torch.Tensor:
    """The features [N, H] that enter the decoder, of all pictures one after the other."""
    found = features if isinstance(features, torch.Tensor | list | tuple) else features.pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])
