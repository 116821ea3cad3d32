"""Fewer image tokens in a transformers model: its base model is given a prompt without those that are dropped.

Pictures are encoded as ever. Then ids, masks, kinds and positions lose the places of the dropped tokens, and features
their rows, so that the base model itself merges both and makes masks and all else that goes by place. Where
`generate()` goes on from there, its masks and positions, which are those of the whole prompt, are shortened at every
step; the stages go on with the shorter prompt by themselves.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from experiment_core_utils.engines.kept_tokens import kept_places
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP, KeptTokens
from experiment_core_utils.models.common.placement import device_of
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT, HFRequests, has_pixels
from experiment_core_utils.primitives.errors import KnobDidNotAct, SampleError, first_line
from experiment_core_utils.tasks.interface import Sample

#: the base model's method that encodes pictures
ENCODER = "get_image_features"
# What `generate()` gives of pictures that it has encoded before.
_ENCODED = "mm_encoder_outputs"
# The picture by which it is tried whether the knob can be turned.
_TRIED = Image.new("RGB", (96, 64), (90, 120, 60))


class PictureEncoder:
    """The base model's encoder of pictures, where it has one by itself.

    Attributes:
        arguments: names of what it takes; None where pictures are encoded inside the prefill, and in a text model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: Any = model.base_model
        encoder = getattr(self._base, ENCODER, None)
        self.arguments = None if encoder is None else tuple(inspect.signature(encoder).parameters)

    def encode(self, inputs: Mapping[str, Any]) -> Any:
        """The features of the pictures of a request; None without one, or where they are encoded in the prefill."""
        given = self.given(inputs)
        return None if given is None else with_pooled_field(getattr(self._base, ENCODER)(**given))

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the encoder is given of a request; None without pictures, or where they are encoded in the prefill."""
        if self.arguments is None or not any(has_pixels(name) for name, each in inputs.items() if each is not None):
            return None
        return {**{name: inputs[name] for name in self.arguments if inputs.get(name) is not None}, "return_dict": True}


def with_pooled_field(encoded: Any) -> Any:
    """What an encoder gave, with a field for its pooled output, which some vendors' code sets beside the fields of an
    output that has none for it; copies of an output have its fields alone.
    """
    pooled = getattr(encoded, "pooler_output", None)
    if pooled is None or not isinstance(encoded, ModelOutput) or "pooler_output" in encoded:
        return encoded
    named = {each.name: encoded.get(each.name) for each in fields(BaseModelOutputWithPooling)}
    return BaseModelOutputWithPooling(**{**named, "pooler_output": pooled})


@dataclass(frozen=True)
class PicturePlaces:
    """Where a batch of prompts has image tokens, on the host."""

    length: int  #: of the prompts, with the padding in front
    token_ids: tuple[tuple[int, ...], ...]  #: of each prompt from its first image token on; empty without one
    places: tuple[tuple[int, ...], ...]  #: of the image tokens, by prompt
    on_device: tuple[torch.Tensor, ...]  #: the same where the model is


class VisualTokens:
    """Drops image tokens of a model, by the value of the knob in force.

    Args:
        model: with or without pictures; without storage, what needs values is not tried.
        requests: of the same checkpoint.
    """

    def __init__(self, model: PreTrainedModel, requests: HFRequests) -> None:
        self._model, self._base, self._requests = model, model.base_model, requests
        self.encoder = PictureEncoder(model)
        self._noted: Any = WeakIdKeyDictionary()
        self.value = VISUAL_TOKEN_KEEP.neutral

    @cached_property
    def unsupported_reason(self) -> str | None:
        """Why no image token can be dropped, tried by encoding a picture; None where they can."""
        name, (width, height) = self._requests.name, _TRIED.size
        if not self._requests.has_vision:
            return f"{name} is a text model: it has no image tokens"
        if self.encoder.arguments is None:
            return f"its base model, a {type(self._base).__name__}, has no {ENCODER} that encodes pictures by itself"
        device, dtype = device_of(self._model.get_input_embeddings()), self._model.dtype
        try:
            inputs = self._requests.make(Sample(0, name, "", (), _TRIED, ""), "Which?", None).inputs
            tokens = int((inputs["input_ids"] == self._requests.placeholder).sum())
            sent = {key: each.to(device, dtype if each.is_floating_point() else None) for key, each in inputs.items()}
            with torch.inference_mode():
                encoded = self.encoder.encode(sent)
        except SampleError as error:
            return f"a picture of {width} x {height} pixels cannot be used ({first_line(error)})"
        except HF_CODE_ERRORS as error:
            # Some code needs values, which the loaded model has.
            return None if device.type == "meta" else f"its {ENCODER} fails by itself ({first_line(error)})"
        if _features_in(encoded, tokens) is not None:
            return None
        return f"a picture of {width} x {height} pixels has {_mismatch(tokens, encoded)}"

    def put(self, value: KeptTokens) -> None:
        self.value = value

    def note(self, host_ids: torch.Tensor, ids: torch.Tensor) -> None:
        """Remember where ids [B, T] have image tokens, so that no run waits for the device to know."""
        rows, placeholder = tuple(map(tuple, host_ids.tolist())), self._requests.placeholder
        places = tuple(tuple(place for place, each in enumerate(row) if each == placeholder) for row in rows)
        on_device = tuple(torch.tensor(each, dtype=torch.long, device=ids.device) for each in places)
        behind = tuple(row[each[0] :] if each else () for row, each in zip(rows, places, strict=True))
        self._noted[ids] = PicturePlaces(ids.shape[1], behind, places, on_device)

    def places_in(self, ids: torch.Tensor) -> PicturePlaces:
        """Where ids have image tokens; waits for the device where they were not noted."""
        if ids not in self._noted:
            self.note(ids, ids)
        found: PicturePlaces = self._noted[ids]
        return found

    @contextmanager
    def shortening(self, ids: torch.Tensor) -> Iterator["Shortened | None"]:
        """A context in which the base model gets prompts of these ids [B, T] without the image tokens that are dropped.

        Yields what was done, None where all are kept.
        """
        found = None if self.value == VISUAL_TOKEN_KEEP.neutral else self.places_in(ids)
        if found is None or not any(found.places):
            yield None
            return
        shortened, plain = Shortened(found, self.value), self._base.forward
        names = tuple(inspect.signature(plain).parameters)

        # `generate()` reads which arguments it takes.
        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            if shortened.is_chosen:
                return plain(**shortened.behind(arguments))
            before = arguments.get(_ENCODED) or {}
            encoded = with_pooled_field(before["image"]) if "image" in before else self.encoder.encode(arguments)
            encoded, arguments = shortened.prompts(arguments, encoded)
            if "image" in before:
                return plain(**{**arguments, _ENCODED: {**before, "image": encoded}})
            with replaced_method(self._base, ENCODER, lambda *_, **__: encoded):
                return plain(**arguments)

        with replaced_method(self._base, "forward", forward):
            yield shortened


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors [..., H] that something is or is a sequence of; empty for anything else."""
    tensors = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else []
    return list(tensors) if all(isinstance(each, torch.Tensor) and each.dim() > 1 for each in tensors) else []


def _num_rows(value: Any) -> int:
    return sum(each.shape[:-1].numel() for each in _tensors(value))


def _features_in(encoded: Any, total: int) -> torch.Tensor | None:
    """Features [N, H] of what an encoder gave, N being `total`: its pooled output, else the first of so many rows."""
    parts = encoded.values() if isinstance(encoded, Mapping) else [encoded]
    candidates = [getattr(encoded, "pooler_output", None), *parts]
    rows = next((_tensors(each) for each in candidates if _num_rows(each) == total), None)
    return None if rows is None else torch.cat([each.flatten(0, -2) for each in rows])


def _mismatch(tokens: int, encoded: Any) -> str:
    rows = _num_rows(getattr(encoded, "pooler_output", encoded))
    return f"{tokens} image tokens in its prompt, and its {ENCODER} gives {rows or 'no'} features"


def _with_rows(encoded: Any, total: int, rows: torch.Tensor) -> Any:
    """What an encoder gave with these rows alone of everything in it that has `total` of them."""
    if isinstance(encoded, Mapping):
        pooled = encoded.get("pooler_output")
        # Beside the pooled output only sequences, as of several layers, go by place.
        changed = {
            name: _with_rows(value, total, rows)
            for name, value in encoded.items()
            if pooled is None or value is pooled or isinstance(value, list | tuple)
        }
        return type(encoded)(**{**encoded, **changed})
    features = _features_in(encoded, total)
    if features is None:
        is_nested = isinstance(encoded, list | tuple)
        return type(encoded)([_with_rows(each, total, rows) for each in encoded]) if is_nested else encoded
    features = features.index_select(0, rows.to(features.device))
    if isinstance(encoded, torch.Tensor):
        return features.view(*[1] * (encoded.dim() - 2), *features.shape)
    return type(encoded)([features])


class Shortened:
    """Prompts without the image tokens that are dropped, and what the base model is given of them.

    Args:
        found: places of image tokens in the whole prompts.
        value: of the knob.
    """

    def __init__(self, found: PicturePlaces, value: KeptTokens) -> None:
        self._found, self._value = found, value
        self._whole = found.length
        dropped = [len(each) - value.count(len(each)) for each in found.places]
        self._dropped, self._length = dropped, self._whole - min(dropped)
        #: [B, T'] places of the tokens of the shorter prompts in the whole ones, and whether each is one, not padding
        self._index: torch.Tensor | None = None
        self._is_token: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether the prompts have been shortened."""
        return self._index is not None

    def prompts(self, arguments: Mapping[str, Any], encoded: Any) -> tuple[Any, dict[str, Any]]:
        """The kept features, and the base model's arguments for the shorter prompts, from those for the whole ones.

        Raises:
            KnobDidNotAct: other features than image tokens.
        """
        total = sum(map(len, self._found.places))
        features = _features_in(encoded, total)
        if features is None:
            raise KnobDidNotAct(f"a request has {_mismatch(total, encoded)}")
        ids = arguments["input_ids"]
        encoded = _with_rows(encoded, total, self._choose(features.to(ids.device)))
        shorter: dict[str, Any] = {
            name: self.along(value)
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and value.shape == ids.shape and not value.is_floating_point()
        }
        shorter["attention_mask"] = self.masked(arguments.get("attention_mask"))
        if arguments.get("position_ids") is not None:
            shorter["position_ids"] = self.positions(arguments["position_ids"])
        return encoded, {**arguments, **shorter}

    def behind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The base model's arguments for tokens behind the shorter prompts, from those behind the whole ones."""
        positions, masks = (
            arguments.get("position_ids"),
            {"attention_mask": self.masked(arguments.get("attention_mask"))},
        )
        if positions is None:
            return {**arguments, **masks}
        return {**arguments, **masks, "position_ids": self._with_numbered(positions, self._behind(positions))}

    def _choose(self, features: torch.Tensor) -> torch.Tensor:
        """Choose the tokens; the places of the features that are kept among those of all prompts [N, H]."""
        device, kept_rows, rows, is_token, before = features.device, [], [], [], 0
        for ids, places, dropped in zip(self._found.token_ids, self._found.on_device, self._dropped, strict=True):
            is_kept = torch.ones(self._whole, dtype=torch.bool, device=device)
            if len(places):
                chosen = kept_places(self._value, features[before : before + len(places)], ids)
                is_kept = is_kept.index_fill(0, places, False).index_fill(0, places.index_select(0, chosen), True)
                kept_rows.append(chosen + before)
                before += len(places)
            # Stable, so that the first are those that are kept, in their order.
            order = torch.argsort(~is_kept, stable=True, dim=0)[: self._whole - dropped]
            filling = self._length - len(order)
            rows.append(torch.nn.functional.pad(order, (filling, 0)))
            real = torch.ones_like(order, dtype=torch.bool)
            is_token.append(torch.nn.functional.pad(real, (filling, 0)))
        self._index, self._is_token = torch.stack(rows), torch.stack(is_token)
        return torch.cat(kept_rows)

    def along(self, given: torch.Tensor) -> torch.Tensor:
        """What is given of each token, [B, T] or [B, T, H], of the tokens that are kept."""
        index = self._index
        assert index is not None
        return torch.stack([each.index_select(0, chosen) for each, chosen in zip(given, index, strict=True)])

    def masked(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask [B, T + new] of the shorter prompts and the tokens behind them; None where nothing is padded."""
        assert self._is_token is not None
        if mask is None and len(set(self._dropped)) == 1:
            return None
        if mask is None:
            mask = self._is_token.new_ones(len(self._dropped), self._whole, dtype=torch.long)
        if self._mask is None:
            self._mask = self.along(mask[:, : self._whole]) * self._is_token
        return torch.cat([self._mask, mask[:, self._whole :]], dim=1)

    def positions(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        """Positions of the shorter prompts from those of the whole ones; see `knobs.visual_token_keep`."""
        if positions is None:
            return None
        assert self._is_token is not None
        mask = self._is_token.long() if self._mask is None else self._mask.long()
        # Some families count from 1.
        first = (positions if positions.dim() == 2 else positions[0]).amin(dim=-1, keepdim=True)
        numbered = (mask.cumsum(-1) - 1).clamp(min=0) + first
        if positions.dim() == 2:
            return numbered
        return self._with_numbered(torch.stack([self.along(each) for each in positions]), numbered)

    def _behind(self, positions: torch.Tensor) -> torch.Tensor:
        """What numbers tokens one after the other, [B, n], of tokens behind the shorter prompts."""
        numbered = positions if positions.dim() == 2 else positions[0]
        if len(set(self._dropped)) == 1:
            # Nothing is sent to the device, which would be waited for.
            return numbered - self._dropped[0]
        return numbered - torch.tensor(self._dropped, device=positions.device)[:, None]

    @staticmethod
    def _with_numbered(positions: torch.Tensor, numbered: torch.Tensor) -> torch.Tensor:
        """The positions with others for what numbers tokens one after the other: all, or the first row of four."""
        if positions.dim() == 2:
            return numbered
        return torch.cat([numbered[None], positions[1:]]) if positions.shape[0] == 4 else positions

    def prompt(self, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Ids and arguments of `generate()` for the shorter prompts, from those for the whole ones."""
        found = dict(kwargs)
        for name in ALONG_THE_PROMPT.keys() & found.keys() - {"attention_mask"}:
            if found[name] is not None:
                found[name] = self.along(found[name])
        found["attention_mask"] = self.masked(found.get("attention_mask"))
        if "position_ids" in found:
            found["position_ids"] = self.positions(found["position_ids"])
        return self.along(ids), found
