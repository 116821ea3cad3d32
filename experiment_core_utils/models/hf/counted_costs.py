"""Operations and bytes of a transformers model without formulas, counted on a twin of it without weights.

The knobs of the blocks are turned in the twin. Towers are run on tensors of the size that requests had; one that needs
their values is counted in the loaded model.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.knobs.active_blocks import blocks_of
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.top_k import experts_of
from experiment_core_utils.models.common.placement import device_of
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.costs.counted import CountedDecoder
from experiment_core_utils.models.costs.counters import count_flops, has_packed_weights, meta_twin
from experiment_core_utils.models.costs.memory import ModelBytes
from experiment_core_utils.models.hf.generate import vision_entry
from experiment_core_utils.models.hf.knobs.controller import DecoderKnobs
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT, has_pixels
from experiment_core_utils.models.hf.visual_token_keep import PictureEncoder
from experiment_core_utils.primitives.errors import ConfigurationError, MeterUnavailable, first_line
from experiment_core_utils.records.requests import RequestShape, RequestSize, StageFlops

# Of requests: tokens beside those of pictures, and those.
_Tokens = tuple[int, int]


@dataclass(frozen=True)
class CountedBytes(ModelBytes):
    """Memory of a decoder whose blocks no formula describes; activations are not counted."""

    cache_elements: Callable[[int], int] = lambda _: 0  #: numbers in a cache of so many positions

    def cache_bytes(self, tokens: int) -> int:
        return self.cache_elements(tokens) * self.element_bytes

    def step_bytes(self, prompt_tokens: int, steps: int, requests: int = 1) -> float:
        # Beside what is cached a step reads its own keys and values; a state of one size has none.
        own = self.cache_bytes(2) - self.cache_bytes(1)
        cached = range(prompt_tokens, prompt_tokens + steps)
        return steps * self.step_weights_bytes + requests * (steps * own + sum(map(self.cache_bytes, cached)))


class CountedCosts:
    """What requests to a model cost, counted when it is first asked for.

    Args:
        model: loaded.
        at_rest: a context in which all its blocks are active.
    """

    def __init__(self, model: PreTrainedModel, at_rest: Callable[[], AbstractContextManager[None]]) -> None:
        self._model, self._at_rest = model, at_rest
        self._arguments = PictureEncoder(model).arguments
        #: pictures of requests, by what differs between them
        self._pictures: dict[_Tokens, dict[Hashable, Mapping[str, torch.Tensor]]] = {}
        self._vision: dict[Hashable, int] = {}
        self._decoders: dict[Hashable, CountedDecoder] = {}
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """Why something cannot be counted, as far as it was tried, which a short text is; None where all can."""
        return self._reason or self._text_reason

    @cached_property
    def _text_reason(self) -> str | None:
        try:
            CountedDecoder(self._twin).request(RequestSize(2, 2))
        except MeterUnavailable as error:
            return str(error)
        return None

    def note(self, inputs: Mapping[str, Any], picture_tokens: int) -> None:
        """Remember the sizes of a request's pictures.

        Args:
            inputs: tensors on the host.
            picture_tokens: among its ids.
        """
        if not picture_tokens:
            return
        names = inputs if self._arguments is None else self._arguments
        given = {name: inputs[name] for name in names if inputs.get(name) is not None}
        of_text = "input_ids", *ALONG_THE_PROMPT
        form = tuple((name, *_size_of(name, each)) for name, each in given.items() if name not in of_text)
        tokens = inputs["input_ids"].shape[1] - picture_tokens, picture_tokens
        sized = {name: each.to("meta") if has_pixels(name) else each for name, each in given.items()}
        self._pictures.setdefault(tokens, {}).setdefault(form, sized)

    def prepare(self, setting: Setting, prompt_tokens: int) -> None:
        """Count what requests of about this length need, so that nothing is counted between timed ones."""
        try:
            with self._at(setting) as decoder:
                decoder.request(RequestSize(prompt_tokens, 2))
        except MeterUnavailable as error:
            self._reason = str(error)

    def stages(self, setting: Setting, shape: RequestShape, output_tokens: int) -> StageFlops | None:
        """FLOPs of a request; None where they cannot be counted, with the `reason`."""
        try:
            with self._at(setting) as decoder:
                stages = decoder.request(shape.size(output_tokens)).stages
            if shape.actual is None:
                return stages
            return replace(stages, vision_flops=self._vision_flops(shape, shape.actual.pooled_features))
        except MeterUnavailable as error:
            self._reason = str(error)
            return None

    def bytes_at(self, setting: Setting, weights_bytes: int, step_bytes: float) -> ModelBytes | None:
        """Memory at a setting; None where its cache cannot be counted, with the `reason`.

        Args:
            weights_bytes: as stored.
            step_bytes: of weights that a decode step reads.
        """

        def elements(tokens: int) -> int:
            with self._at(setting) as decoder:
                return decoder.cache_elements(tokens)

        try:
            elements(1)
        except MeterUnavailable as error:
            self._reason = str(error)
            return None
        return CountedBytes(weights_bytes, step_bytes, (), self._model.dtype.itemsize, None, elements)

    @cached_property
    def _twin(self) -> PreTrainedModel:
        """Raises MeterUnavailable where there is none."""
        with self._at_rest():
            return meta_twin(self._model)

    @cached_property
    def _knobs(self) -> DecoderKnobs:
        return DecoderKnobs(self._twin)

    @contextmanager
    def _at(self, setting: Setting) -> Iterator[CountedDecoder]:
        """A context with the twin at a setting; raises MeterUnavailable where it cannot be."""
        key = experts_of(setting), blocks_of(setting)
        try:
            in_force = self._knobs.applied(*key)
            with in_force:
                if key not in self._decoders:
                    self._decoders[key] = CountedDecoder(self._twin)
                yield self._decoders[key]
        except ConfigurationError as error:
            raise MeterUnavailable(f"{setting.key} cannot be counted without weights: {error}") from error

    def _vision_flops(self, shape: RequestShape, features: int) -> int:
        beside = (shape.text_tokens or 0) + (shape.image_marker_tokens or 0)
        forms = self._pictures.get((beside, features), {})
        found = {self._encoded(form, sized) for form, sized in forms.items()}
        if len(found) != 1:
            why = "pictures of several sizes have as many" if found else "no such picture was seen"
            raise MeterUnavailable(f"the encoder's operations for {features} image tokens are not known: {why}")
        return found.pop()

    def _encoded(self, form: Hashable, sized: Mapping[str, torch.Tensor]) -> int:
        if form not in self._vision:
            try:
                self._vision[form] = _encoder_flops(self._twin, sized)
            except HF_CODE_ERRORS:  # not lost: it needs values, which the loaded model has
                self._vision[form] = self._encoded_by_model(sized)
        return self._vision[form]

    def _encoded_by_model(self, sized: Mapping[str, torch.Tensor]) -> int:
        name = type(self._model).__name__
        if has_packed_weights(self._model):
            raise MeterUnavailable(f"the encoder of {name} needs values, and the products of packed weights have none")
        device = device_of(self._model.get_input_embeddings())
        # Of pictures that are all 0 some families take them for padding.
        filled = {
            key: torch.ones(each.shape, dtype=self._model.dtype, device=device)
            if each.is_meta
            else each.to(device, self._model.dtype if each.is_floating_point() else None)
            for key, each in sized.items()
        }
        try:
            return _encoder_flops(self._model, filled)
        except HF_CODE_ERRORS as error:
            raise MeterUnavailable(
                f"the encoder of {name} cannot be counted: {type(error).__name__}: {first_line(error)}"
            ) from error


def _encoder_flops(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> int:
    """FLOPs of the encoder of pictures, by itself or of its first call in a prefill; raises MeterUnavailable."""
    encoder, entry = PictureEncoder(model), vision_entry(model)
    if encoder.arguments is not None:
        return count_flops(lambda: encoder.encode(inputs))
    if not isinstance(entry, nn.Module):
        raise MeterUnavailable("pictures are encoded inside the prefill, and no module of it is known to do so")
    plain = entry.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        raise _EncoderCounted(count_flops(lambda: plain(*args, **kwargs)))

    with replaced_method(entry, "forward", counted), torch.inference_mode():
        try:
            model(**inputs)
        except _EncoderCounted as found:
            return found.flops
    raise MeterUnavailable(f"pictures do not run through the {type(entry).__name__} of the model")


class _EncoderCounted(Exception):
    """Ends a prefill when its encoder is counted, so that blocks, which several processes may share, do not run."""

    def __init__(self, flops: int) -> None:
        super().__init__()
        self.flops = flops


def _size_of(name: str, tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What operations may depend on: the shape, and of masks, sizes and positions the values."""
    values = None if has_pixels(name) else tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), values
