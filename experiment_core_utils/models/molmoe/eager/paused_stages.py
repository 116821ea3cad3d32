"""MolmoE's stages with a paused prefill by its modules.

The rest of the setting is chosen at the pause; before it, nothing of it is known.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from experiment_core_utils.engines.description import EngineKnobs
from experiment_core_utils.engines.paused_runner import PausedPrefillStages
from experiment_core_utils.models.molmoe.eager.paused_prefill import PausedPrefill, begin_prefill, finish_prefill
from experiment_core_utils.models.molmoe.eager.stages import EagerStages
from experiment_core_utils.models.molmoe.modeling_molmoe import (
    DecodeState,
    MolmoeForConditionalGeneration,
    MolmoeImageFeatures,
)
from experiment_core_utils.primitives.errors import SettingError


class EagerPausedPrefill(PausedPrefillStages):
    """The stages by the model's modules; the first blocks run with the model's own knobs."""

    _stages: EagerStages
    _paused: PausedPrefill | None = None

    def __init__(self, model: MolmoeForConditionalGeneration, stages: EagerStages) -> None:
        super().__init__(stages)
        self._model = model

    def reset(self) -> None:
        self._model.reset_knobs()

    def begin(
        self,
        inputs: Mapping[str, Any],
        features: MolmoeImageFeatures | None,
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
    ) -> torch.Tensor:
        paused = begin_prefill(self._model, inputs["input_ids"], features, pause, appended)
        self._paused = paused
        return torch.cat([paused.states[0, -1:], paused.appended[0]])

    def finish(self, knobs: EngineKnobs) -> tuple[torch.Tensor, DecodeState]:
        if self._paused is None:
            raise SettingError("no prefill was started, or it was finished; start it again")
        paused, self._paused = self._paused, None
        return finish_prefill(self._model, paused, *knobs)

    def decoding(self) -> AbstractContextManager[None]:
        return self._stages.decoding()
