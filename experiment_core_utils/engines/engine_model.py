"""What a family of models hands to the engines: its weights as data, its requests, and its modules as the judge."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_proof import Computed, TracedPasses
from experiment_core_utils.engines.weights import DecoderWeights, VisionModules, VisionWeights


class EngineModel(Protocol):
    """A model whose stages engines run; features are what its own modules make of a picture."""

    @property
    def modules(self) -> PreTrainedModel:
        """The model itself, on its device, in its dtype."""

    def fused_decoder(self) -> DecoderWeights:
        """The decoder's weights, fused; raises ConfigurationError where engines compute something else."""

    def fused_vision(self) -> VisionWeights:
        """Weights of tower and connector, fused; raises ConfigurationError where engines compute something else."""

    def fused_vision_modules(self) -> VisionModules:
        """The tower as modules, with fused blocks; raises ConfigurationError as `fused_vision` does."""

    def length(self, inputs: Mapping[str, Any]) -> int:
        """The tokens of a request that enter the decoder."""

    def num_features(self, inputs: Mapping[str, Any]) -> int:
        """The image tokens of a request as it was prepared."""

    def shortened(self, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, Any]:
        """The ids [1, T] that enter the decoder, and their features."""

    def picture(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Crops [K, 3, S, S] and masks [K, P] of a request; None without a picture."""

    def features(self, encoded: torch.Tensor, inputs: Mapping[str, Any]) -> Any:
        """The features of a request, as an engine encoded them: [K * F, H]."""

    def features_by_modules(self, inputs: Mapping[str, Any]) -> Any:
        """The features of a request with a picture, by the modules."""

    def placed(self, features: Any) -> torch.Tensor:
        """Features [N, H] that have a place in the prompt."""

    def embedded(self, prompt: torch.Tensor, features: Any, embedding: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, H] of a prompt [1, T] with its features, given those of all tokens [V, H]."""

    def judging(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """A context in which the modules compute in the precision above `dtype`; EngineRefused where they cannot."""

    def run_modules(
        self, knobs: EngineKnobs, ids: torch.Tensor, features: Any, positions: int, passes: TracedPasses
    ) -> Computed:
        """One pass of the modules over ids [1, T] at these knobs: logits of the last positions, keys and values."""
