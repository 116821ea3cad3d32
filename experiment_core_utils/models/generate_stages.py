"""In: a model of transformers; out: what its `generate()` does, as three stages that can be called one by one.

The steps are those of `generate()` with greedy decoding and a growing cache: prepared inputs, one forward pass, the
bookkeeping for the next. Pictures are encoded by the base model's `get_image_features`; in the prefill the same method
gives back what was encoded before.
"""

import inspect
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from experiment_core_utils.models.decode_kernels import DecodeKernels
from experiment_core_utils.models.generate_marks import replaced_method
from experiment_core_utils.primitives.errors import SettingError

_PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
_ENCODER = "get_image_features"
# What `forward` calls its cache; the second name is that of the Mamba models.
_CACHE_NAMES = ("past_key_values", "cache_params")


@dataclass
class GenerationState:
    """Between two tokens.

    Attributes:
        steps: ids so far and what `generate()` would carry on with, behind the prefill and behind each step since.
    """

    steps: list[tuple[torch.Tensor, dict[str, Any]]]

    @property
    def cache(self) -> Any:
        """Keys and values, and the states of recurrent blocks."""
        carried = self.steps[-1][1]
        return next(carried[name] for name in _CACHE_NAMES if carried.get(name) is not None)

    @property
    def filled_layers(self) -> int:
        """Layers of the cache that hold keys or a recurrent state."""
        return sum(map(_is_filled, self.cache.layers))


class GenerateStages:
    """The three stages of one model; one request or a batch of them, padded on the left."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._kernels = DecodeKernels(model)
        taken = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._cache_name = next((name for name in _CACHE_NAMES if name in taken), _CACHE_NAMES[0])
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        encoder = getattr(model.base_model, _ENCODER, None)
        self._encoder_arguments = None if encoder is None else tuple(inspect.signature(encoder).parameters)

    @property
    def can_encode_alone(self) -> bool:
        """Whether pictures can be encoded by themselves; else that happens inside the prefill."""
        return self._encoder_arguments is not None

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """What the base model makes of the pictures; None without one, or where they are encoded in the prefill."""
        if self._encoder_arguments is None or not any(name in inputs for name in _PIXELS):
            return None
        given = {name: inputs[name] for name in self._encoder_arguments if name in inputs}
        return getattr(self._model.base_model, _ENCODER)(**given, return_dict=True)

    def prefill(self, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, GenerationState]:
        """Logits [B, V] of the last position, and the state for `decode_step`."""
        model = self._model
        ids = inputs["input_ids"]
        kwargs = {name: value for name, value in inputs.items() if name != "input_ids"}
        if self._takes_positions:
            kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids, kwargs)
        if "attention_mask" in kwargs and bool((kwargs["attention_mask"] == 1).all()):
            kwargs["attention_mask"] = None
        kwargs |= self._last_only
        kwargs["use_cache"] = True
        kwargs[self._cache_name] = DynamicCache(config=model.config.get_text_config(decoder=True))
        prepared = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        with ExitStack() as stack:
            if features is not None:
                stack.enter_context(replaced_method(model.base_model, _ENCODER, lambda *_, **__: features))
            outputs = model(**prepared, return_dict=True)
        return outputs.logits[:, -1], GenerationState([(ids, self._carried_on(outputs, kwargs))])

    def decoding(self) -> AbstractContextManager[None]:
        """See `Stages.decoding`."""
        return self._kernels.taken()

    def decode_step(self, token: torch.Tensor, state: GenerationState) -> torch.Tensor:
        """Token [B, 1] -> logits [B, V]."""
        if self._kernels.are_missing:
            with self.decoding():
                return self.decode_step(token, state)
        ids, kwargs = state.steps[-1]
        ids = torch.cat([ids, token], dim=-1)
        prepared = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
        outputs = self._model(**prepared, return_dict=True)
        state.steps.append((ids, self._carried_on(outputs, kwargs)))
        return outputs.logits[:, -1]

    def rewind(self, state: GenerationState, steps: int) -> None:
        """Take the state behind the last so many steps back to where it was before the first of them.

        Raises:
            SettingError: the cache forgets what it would have to be taken back to (a sliding window, a recurrence).
        """
        if not steps:
            return
        try:
            state.cache.crop(-steps)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise SettingError(
                f"the cache of this {self._model.config.model_type} cannot be taken back by {steps} steps, so that its "
                "stages cannot be repeated; measure it without energy by stages"
            ) from error
        del state.steps[-steps:]

    def _carried_on(self, outputs: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        carried: dict[str, Any] = self._model._update_model_kwargs_for_generation(outputs, dict(kwargs))
        return carried


def stages_unsupported_reason(model: PreTrainedModel, made: Set[str]) -> str | None:
    """Why the stages of a model cannot be run one by one; None where they can.

    Args:
        model: after its decoder ran a prompt.
        made: its `loose_tensors` before that.
    """
    if not model._supports_default_dynamic_cache():
        return "it has its own kind of cache, which prefill and decode steps cannot share outside generate()"
    left = sorted(loose_tensors(model) - made)
    if left:
        return f"its blocks keep the state of a request in themselves and not in the cache ({left[0]})"
    return None


def loose_tensors(model: PreTrainedModel) -> frozenset[str]:
    """Names of tensors that modules hold beside their parameters and buffers."""
    return frozenset(
        f"{place}.{name}"
        for place, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    )


def _is_filled(layer: Any) -> bool:
    """Whether a layer of a cache holds anything; a recurrent one has states in place of keys, each under a number."""
    held = [each for value in vars(layer).values() for each in (value.values() if isinstance(value, dict) else [value])]
    return bool(getattr(layer, "is_initialized", False)) or any(isinstance(each, torch.Tensor) for each in held)
