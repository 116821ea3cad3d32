"""Fewer image tokens in MolmoE: between vision and prefill, features leave with their places in the prompt.

Features that have no place anyway, where crops overlap, do not count; marks of parts and of columns stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from experiment_core_utils.engines.kept_tokens import kept_places
from experiment_core_utils.knobs.visual_token_keep import VISUAL_TOKEN_KEEP, KeptTokens
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeImageFeatures


@dataclass(frozen=True)
class PlacedFeatures:
    """Which features of a request have a place in its prompt, in the order of the prompt."""

    token_ids: tuple[int, ...]  #: of the prompt from the first of them on, on the host
    features: torch.Tensor  #: [N] among all features, where the model is
    places: torch.Tensor  #: [N] in the prompt, ascending, where the model is


class PlacedTokens:
    """Drops image tokens of requests, by the value of the knob in force."""

    unsupported_reason: str | None = None  #: see `KnobAdapter.unsupported_reason`

    def __init__(self) -> None:
        self._noted: Any = WeakIdKeyDictionary()
        self.value = VISUAL_TOKEN_KEEP.neutral

    def put(self, value: KeptTokens) -> None:
        self.value = value

    def note(self, host: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Remember where a request's features are placed, so that no run waits for the device to know."""
        if "image_input_idx" not in inputs:
            return
        ids, places = host["input_ids"][0], host["image_input_idx"].flatten()
        order = places.argsort()
        order = order[places[order] >= 0]
        device, ordered = inputs["input_ids"].device, places[order]
        found = PlacedFeatures(tuple(ids[ordered[0] :].tolist()), order.to(device), ordered.to(device))
        self._noted[inputs["input_ids"]] = found

    def placed(self, inputs: Mapping[str, Any]) -> PlacedFeatures | None:
        """The features that have a place; None without a picture. Waits for the device where it was not noted."""
        if "image_input_idx" not in inputs:
            return None
        ids = inputs["input_ids"]
        if ids not in self._noted:
            self.note({name: inputs[name].cpu() for name in ("input_ids", "image_input_idx")}, inputs)
        found: PlacedFeatures = self._noted[ids]
        return found

    def num_features(self, inputs: Mapping[str, Any]) -> int:
        """The image tokens of a request as it was prepared."""
        found = self.placed(inputs)
        return 0 if found is None else len(found.places)

    def length(self, inputs: Mapping[str, Any]) -> int:
        """The tokens of a request that enter the decoder."""
        whole: int = inputs["input_ids"].shape[1]
        if self.value == VISUAL_TOKEN_KEEP.neutral:
            return whole
        features = self.num_features(inputs)
        return whole - features + self.value.count(features)

    def shortened(
        self, inputs: Mapping[str, Any], features: MolmoeImageFeatures | None
    ) -> tuple[torch.Tensor, MolmoeImageFeatures | None]:
        """The ids [1, T'] and the features of a request without what is dropped."""
        ids: torch.Tensor = inputs["input_ids"]
        found = None if self.value == VISUAL_TOKEN_KEEP.neutral else self.placed(inputs)
        if found is None or features is None:
            return ids, features
        pooled = features.pooler_output[0].index_select(0, found.features)
        kept = kept_places(self.value, pooled, found.token_ids)
        places = found.places.index_select(0, kept)
        stays = torch.ones_like(ids[0], dtype=torch.bool)
        stays = stays.index_fill(0, found.places, False).index_fill(0, places, True)
        # Stable, so that the first are those that stay, in their order.
        order = torch.argsort(~stays, stable=True, dim=0)[: self.length(inputs)]
        renumbered = (stays.long().cumsum(0) - 1).index_select(0, places)
        return ids[:, order], MolmoeImageFeatures(
            pooler_output=pooled.index_select(0, kept)[None], image_input_idx=renumbered[None]
        )
