"""Fewer image tokens in a transformers model: the decoder is given a prompt without those that are dropped.

Everything in front of the decoder runs as ever. Where `generate()` goes on from there, its masks and positions, which
are those of the whole prompt, are shortened at every step; the stages go on with the shorter prompt by themselves.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP, KeptTokens
from experiment_core_utils.models.hf.knobs.patches import replaced_method
from experiment_core_utils.models.hf.requests import ALONG_THE_PROMPT, HFRequests

# Families whose decoder takes the embeddings of the whole prompt, attends to what is before alone, and gets nothing
# else by place than what `Shortened` shortens.
FAMILIES = (
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)


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
        model: of one of `FAMILIES`, or a model that lacks the knob.
        requests: of the same checkpoint.
    """

    def __init__(self, model: PreTrainedModel, requests: HFRequests) -> None:
        self._decoder: Any = model.get_decoder()
        self._requests, self._family = requests, model.config.model_type
        self._noted: Any = WeakIdKeyDictionary()
        self.value = VISUAL_TOKEN_KEEP.neutral

    @property
    def unsupported_reason(self) -> str | None:
        if not self._requests.has_vision:
            return f"{self._requests.name} is a text model: it has no image tokens"
        if self._family not in FAMILIES:
            return (
                f"what a {self._family} gives its decoder by place is not known here; image tokens can be dropped in "
                f"{', '.join(FAMILIES)}"
            )
        return None

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
        """A context in which the decoder gets prompts of these ids [B, T] without the image tokens that are dropped.

        Yields what was done, None where all are kept.
        """
        found = None if self.value == VISUAL_TOKEN_KEEP.neutral else self.places_in(ids)
        if found is None or not any(found.places):
            yield None
            return
        shortened, plain = Shortened(found, self.value), self._decoder.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **shortened.given(kwargs))

        with replaced_method(self._decoder, "forward", forward):
            yield shortened


class Shortened:
    """Prompts without the image tokens that are dropped, and what the decoder is given of them.

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

    def given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The decoder's arguments for the prompts or for the tokens behind them, from those for the whole prompts."""
        kwargs = dict(kwargs)
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if self._index is None:
            kept = self._choose(kwargs["inputs_embeds"])
            kwargs["inputs_embeds"] = self.along(kwargs["inputs_embeds"])
            if kwargs.get("visual_pos_masks") is not None:
                of_pictures: Any = self.along(kwargs["visual_pos_masks"])
                kwargs["visual_pos_masks"] = of_pictures & self._is_token
                kwargs["deepstack_visual_embeds"] = [each[kept] for each in kwargs["deepstack_visual_embeds"]]
            kwargs["attention_mask"] = self.masked(mask)
            kwargs["position_ids"] = self.positions(positions)
        else:
            kwargs["attention_mask"] = self.masked(mask)
            if positions is not None:
                kwargs["position_ids"] = self._with_numbered(positions, self._behind(positions))
        return kwargs

    def _choose(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Choose the tokens; the places of the features that are kept, among the features of all prompts."""
        device, features, rows, is_token, before = embeddings.device, [], [], [], 0
        for row, (ids, places, dropped) in enumerate(
            zip(self._found.token_ids, self._found.on_device, self._dropped, strict=True)
        ):
            is_kept = torch.ones(self._whole, dtype=torch.bool, device=device)
            if len(places):
                kept = self._value.places(embeddings[row].index_select(0, places), ids)
                is_kept = is_kept.index_fill(0, places, False).index_fill(0, places.index_select(0, kept), True)
                features.append(kept + before)
                before += len(places)
            # Stable, so that the first are those that are kept, in their order.
            order = torch.argsort(~is_kept, stable=True, dim=0)[: self._whole - dropped]
            filling = self._length - len(order)
            rows.append(torch.nn.functional.pad(order, (filling, 0)))
            real = torch.ones_like(order, dtype=torch.bool)
            is_token.append(torch.nn.functional.pad(real, (filling, 0)))
        self._index, self._is_token = torch.stack(rows), torch.stack(is_token)
        return torch.cat(features)

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
        numbered = (mask.cumsum(-1) - 1).clamp(min=0)
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
