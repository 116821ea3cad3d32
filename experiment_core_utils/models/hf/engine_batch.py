"""Requests of a transformers model that engines prefill one by one, to decode them together."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from experiment_core_utils.engines.api import DecodeEngine
from experiment_core_utils.engines.batch_runner import BatchedStages
from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.kv_cache import KVCache
from experiment_core_utils.models.hf.engine_stages import EngineParts
from experiment_core_utils.models.hf.graphed_stages import GraphedGeneration
from experiment_core_utils.primitives.private_apis import flattened, unflattened


class EngineRequests(BatchedStages):
    """The `BatchedStages` of a model whose decoder runs by engines.

    Args:
        graphed: the stages of single requests by `parts`.
        setting: gives the one in force, as `graphed` names it.
    """

    def __init__(self, graphed: GraphedGeneration, parts: EngineParts, setting: Callable[[], Hashable]) -> None:
        self._graphed, self._parts, self._setting = graphed, parts, setting
        self.decoder = parts.decoder

    @property
    def is_graphed(self) -> bool:
        return self._parts.is_captured

    def new_decode_engine(self) -> DecodeEngine:
        return self._parts.new_engines().decode

    def most_positions(self, inputs: Mapping[str, Any]) -> int:
        return int(inputs["input_ids"].shape[1])

    def warm_up(self, knobs: EngineKnobs, inputs: Mapping[str, Any], max_new_tokens: int) -> None:
        self._graphed.warm_up(self._setting(), inputs, max_new_tokens)

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """Features are copied, since the next picture of the same size is encoded into the same memory."""
        features = self._graphed.encode_image(inputs)
        if features is None or not self.is_graphed:
            return features
        leaves, layout = flattened(features)
        return unflattened([each.clone() if isinstance(each, torch.Tensor) else each for each in leaves], layout)

    def prefill_row(
        self, knobs: EngineKnobs, inputs: Mapping[str, Any], features: Any, kv_cache: KVCache, row: int
    ) -> torch.Tensor:
        logits, _ = self._graphed.prefill(self._setting(), inputs, features)
        kv_cache.copy_into_row(row, self._parts.kv_cache)
        return logits
