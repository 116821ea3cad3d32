"""MolmoE as its engines see it; see `EngineModel`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.engine_proof import Computed, TracedPasses
from experiment_core_utils.engines.weights import DecoderWeights, VisionModules, VisionWeights
from experiment_core_utils.models.common.judging import judging
from experiment_core_utils.models.molmoe.fused_weights import (
    fuse_decoder_weights,
    fuse_vision_weights,
    fused_vision_modules,
)
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeForConditionalGeneration, MolmoeImageFeatures
from experiment_core_utils.models.molmoe.visual_token_keep import PlacedTokens


class MolmoeEngineModel:
    """An `EngineModel`.

    Args:
        placed_tokens: drops image tokens between vision and prefill; None drops none.
    """

    def __init__(self, model: MolmoeForConditionalGeneration, placed_tokens: PlacedTokens | None = None) -> None:
        self._model = model
        placed_tokens = placed_tokens or PlacedTokens()
        self.length = placed_tokens.length
        self.num_features = placed_tokens.num_features
        self.shortened = placed_tokens.shortened

    @property
    def modules(self) -> MolmoeForConditionalGeneration:
        return self._model

    def fused_decoder(self) -> DecoderWeights:
        return fuse_decoder_weights(self._model)

    def fused_vision(self) -> VisionWeights:
        return fuse_vision_weights(self._model)

    def fused_vision_modules(self) -> VisionModules:
        return fused_vision_modules(self._model)

    def picture(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (inputs["pixel_values"][0], inputs["image_masks"][0]) if "pixel_values" in inputs else None

    def features(self, encoded: torch.Tensor, inputs: Mapping[str, Any]) -> MolmoeImageFeatures:
        places = inputs["image_input_idx"].flatten(1)
        return MolmoeImageFeatures(pooler_output=encoded[None], image_input_idx=places)

    def features_by_modules(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures:
        return self._model.encode_image(inputs["pixel_values"], inputs["image_masks"], inputs["image_input_idx"])

    def placed(self, features: MolmoeImageFeatures) -> torch.Tensor:
        return features.pooler_output[features.image_input_idx >= 0]

    def embedded(
        self, prompt: torch.Tensor, features: MolmoeImageFeatures | None, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Features are added to the embeddings at their places."""
        tokens = prompt.shape[1]
        embeddings = F.embedding(prompt[0], embedding)
        if features is None:
            return embeddings
        places = features.image_input_idx[0]
        # One row more, for the features that are dropped.
        roomy = F.pad(embeddings, (0, 0, 0, 1))
        roomy.index_add_(0, torch.where(places < 0, tokens, places), features.pooler_output[0].to(roomy.dtype))
        return roomy[:tokens]

    def judging(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        return judging(self._model, dtype)

    def run_modules(
        self,
        knobs: EngineKnobs,
        ids: torch.Tensor,
        features: MolmoeImageFeatures | None,
        positions: int,
        passes: TracedPasses,
    ) -> Computed:
        model = self._model
        with model.knobs(knobs.top_k, knobs.blocks), passes.next():
            cache = DynamicCache(config=model.config.text_config)
            embeddings = model.model.embed(ids, features)
            hidden = model.model(inputs_embeds=embeddings, past_key_values=cache, use_cache=True).last_hidden_state
            logits = model.lm_head(hidden[:, -positions:])
        return Computed(list(logits.unbind(dim=1)), [(layer.keys[0], layer.values[0]) for layer in cache.layers])
