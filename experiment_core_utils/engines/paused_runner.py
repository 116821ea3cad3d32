"""MolmoE's stages with a paused prefill, by modules or by engines.

The rest of the setting is chosen at the pause; before it, nothing of it is known.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.engines.api import EngineKnobs
from experiment_core_utils.engines.runner import EngineStages
from experiment_core_utils.models.common.request_slot import PrefilledRequest
from experiment_core_utils.models.molmoe.eager.paused_prefill import (
    PausedPrefill,
    begin_prefill,
    check_pause,
    check_rest,
    finish_prefill,
)
from experiment_core_utils.models.molmoe.eager.stages import EagerStages
from experiment_core_utils.models.molmoe.modeling_molmoe import (
    DecodeState,
    MolmoeForConditionalGeneration,
    MolmoeImageFeatures,
)
from experiment_core_utils.primitives.errors import SettingError


@dataclass(frozen=True)
class PausedPrefillShape:
    """The sizes and choices of a request that memory and CUDA graphs must be prepared for."""

    tokens: int  #: of its prompt
    crops: int | None  #: the overview counted; None without a picture
    max_new_tokens: int
    choices: tuple[tuple[int, EngineKnobs], ...]  #: each pause that may come, and the knobs after it


class PausedPrefillStages:
    """The stages of one request at a time; `finish` resumes the last paused prompt."""

    _stages: Any

    def __init__(self, model: MolmoeForConditionalGeneration, stages: Any) -> None:
        self._model = model
        self._stages = stages

    @property
    def is_graphed(self) -> bool:
        """Whether steps are graphed, so that the host need not wait for each."""
        return False

    def warm_up(self, shapes: Sequence[PausedPrefillShape]) -> None:
        """Prepare all that requests of these shapes need (at least one shape); earlier states become invalid.

        Raises:
            ConfigurationError: they cannot be run so.
        """

    def reset(self) -> None:
        """Put in force what a new request needs; engines get their knobs at each call."""

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        """See `StagedModel.encode_image`."""
        features: MolmoeImageFeatures | None = self._stages.encode_image(inputs)
        return features

    def begin(
        self,
        inputs: Mapping[str, Any],
        features: MolmoeImageFeatures | None,
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
    ) -> torch.Tensor:
        """Run the first `pause` blocks over the prompt and a row [1, 1, H] after it, each with the model's own experts.

        Returns:
            states there of the prompt's last token and of the row: [2, H], not normalised; without a row [1, H].

        Raises:
            ConfigurationError: a pause that is not possible.
        """
        raise NotImplementedError

    def finish(self, knobs: EngineKnobs) -> tuple[torch.Tensor, Any]:
        """Run the active blocks that have not run: logits [1, V] and the decode's state; see
        `paused_prefill.finish_prefill`.

        Raises:
            ConfigurationError: a setting that is not possible, or that leaves out a block that has run.
            SettingError: no prefill was started, or another request has its slot by now.
        """
        raise NotImplementedError

    def decoding(self) -> AbstractContextManager[None]:
        """See `Stages.decoding`; engines switch nothing."""
        return nullcontext()

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        """See `StagedModel.decode_step`."""
        logits: torch.Tensor = self._stages.decode_step(token, state)
        return logits


class EagerPausedPrefill(PausedPrefillStages):
    """The stages by the model's modules; the first blocks run with the model's own knobs."""

    _stages: EagerStages
    _paused: PausedPrefill | None = None

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


class EnginePausedPrefill(PausedPrefillStages):
    """The stages by the engines, on the KV cache of whole requests."""

    _stages: EngineStages

    @property
    def is_graphed(self) -> bool:
        return self._stages.is_graphed

    @property
    def last_token(self) -> torch.Tensor:
        """The token [1] that the last step chose, as `checked_tokens` gives it; the next step overwrites it."""
        return self._stages.kv_cache.checked_tokens

    def warm_up(self, shapes: Sequence[PausedPrefillShape]) -> None:
        # The longest shape comes first: a KV cache that grows loses its CUDA graphs.
        self._stages.reserve(max(shape.tokens + shape.max_new_tokens for shape in shapes))
        engines, kv_cache = self._stages.engines, self._stages.kv_cache
        for shape in shapes:
            if shape.crops is not None and engines.vision is not None:
                engines.vision.warm_up(shape.crops)
            for pause, knobs in shape.choices:
                engines.split.warm_up(pause, knobs, kv_cache, shape.tokens)
        for knobs in dict.fromkeys(knobs for shape in shapes for _, knobs in shape.choices):
            engines.decode.warm_up(knobs, kv_cache)

    def begin(
        self,
        inputs: Mapping[str, Any],
        features: MolmoeImageFeatures | None,
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
    ) -> torch.Tensor:
        check_pause(pause, self._model.num_total_blocks)
        prompt = inputs["input_ids"]
        self._stages.reserve(prompt.shape[1] + max_new_tokens)
        row = None if appended is None else appended[0, 0]
        embeddings = self._stages.embedded(prompt, features)
        states = self._stages.engines.split.begin(embeddings, row, pause, self._stages.kv_cache)
        self._stages.slot.begin(prompt, pause)
        return states

    def finish(self, knobs: EngineKnobs) -> tuple[torch.Tensor, PrefilledRequest[EngineKnobs]]:
        paused_request = self._stages.slot.paused_request
        check_rest(knobs.blocks, paused_request.pause)
        knobs = self._model.checked_setting(*knobs)
        logits = self._stages.engines.split.finish(knobs, self._stages.kv_cache)
        return logits, self._stages.occupy(knobs, paused_request.prompt, paused_request.pause)

    def first_token(self, logits: torch.Tensor) -> None:
        """Put the likeliest token where the first step reads it."""
        self._stages.kv_cache.put_likeliest(logits)

    def advance(self, state: PrefilledRequest[EngineKnobs]) -> None:
        """A decode step from the last token, and the choice of the next."""
        self._stages.step(state)
