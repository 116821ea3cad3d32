"""A model's stages with a paused prefill: what modules and engines offer, and those by engines.

The rest of the setting is chosen at the pause; before it, nothing of it is known.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from experiment_core_utils.engines.description import EngineKnobs, check_pause, check_rest
from experiment_core_utils.engines.request_slot import PrefilledRequest
from experiment_core_utils.engines.runner import EngineStages


@dataclass(frozen=True)
class PausedPrefillShape:
    """The sizes and choices of a request that memory and CUDA graphs must be prepared for."""

    tokens: int  #: of its prompt
    crops: int | None  #: the overview counted; None without a picture
    max_new_tokens: int
    choices: tuple[tuple[int, EngineKnobs], ...]  #: each pause that may come, and the knobs after it


@dataclass(frozen=True)
class TracedPrefill:
    """The states after each of the first P blocks, not normalised."""

    last: torch.Tensor  #: [P, H] of the prompt's last token
    appended: torch.Tensor  #: [P, R, H] of R rows, each as if it alone came after the prompt


class PausedPrefillStages:
    """The stages of one request at a time; `finish` resumes the last paused prompt."""

    def __init__(self, stages: Any) -> None:
        self._stages = stages

    runs_by_engines = False  #: whether requests have to be warmed up

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

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        return self._stages.encode_image(inputs)

    def begin(
        self,
        inputs: Mapping[str, Any],
        features: Any,
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
        `eager.paused_prefill.finish_prefill`.

        Raises:
            ConfigurationError: a setting that is not possible, or that leaves out a block that has run.
            SettingError: no prefill was started, or another request has its slot by now.
        """
        raise NotImplementedError

    def decoding(self) -> AbstractContextManager[None]:
        """Engines switch nothing."""
        return nullcontext()

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        logits: torch.Tensor = self._stages.decode_step(token, state)
        return logits


class EnginePausedPrefill(PausedPrefillStages):
    """The stages by the engines, on the KV cache of whole requests."""

    _stages: EngineStages
    runs_by_engines = True

    @property
    def is_graphed(self) -> bool:
        return self._stages.is_graphed

    @property
    def last_tokens(self) -> torch.Tensor:
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
        features: Any,
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
    ) -> torch.Tensor:
        check_pause(pause, len(self._stages.decoder.blocks))
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
        knobs.refuse_impossible(self._stages.decoder.num_experts, len(self._stages.decoder.blocks))
        logits = self._stages.engines.split.finish(knobs, self._stages.kv_cache)
        return logits, self._stages.occupy(knobs, paused_request.prompt, paused_request.pause)

    def first_token(self, logits: torch.Tensor) -> None:
        """Put the likeliest token where the first step reads it."""
        self._stages.kv_cache.put_likeliest(logits)

    def advance(self, state: PrefilledRequest[EngineKnobs]) -> None:
        """A decode step from the last token, and the choice of the next."""
        self._stages.step(state)
