"""In: stages with a pause, and what is chosen there; out: stages as a greedy generation runs them, whole ones."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from experiment_core_utils.models.common.request_slot import PrefilledRequest
from experiment_core_utils.models.interface import Component
from experiment_core_utils.models.molmoe.engines.api import DecoderKnobs
from experiment_core_utils.models.molmoe.engines.paused_runner import EnginePausedPrefill, PausedPrefillStages
from experiment_core_utils.models.molmoe.modeling_molmoe import MolmoeImageFeatures
from experiment_core_utils.primitives.errors import SettingError

Choose = Callable[[torch.Tensor], DecoderKnobs]


class PausedStages:
    """`Stages` of one request, in whose prefill the knobs of the rest are chosen.

    Args:
        appended: row [1, 1, H] behind the prompt in the first blocks; None for none.
        choose: states behind the pause -> the knobs; see `PausedPrefillStages.begin` for those states.

    Attributes:
        device, eos_token_ids: as of `Stages`.
    """

    def __init__(
        self,
        split: PausedPrefillStages,
        device: torch.device,
        eos_token_ids: frozenset[int],
        pause: int,
        appended: torch.Tensor | None,
        max_new_tokens: int,
        choose: Choose,
    ) -> None:
        self.device = device
        self.eos_token_ids = eos_token_ids
        self._split = split
        self._requested = pause, appended, max_new_tokens
        self._choose = choose
        self._chosen: DecoderKnobs | None = None

    @property
    def chosen(self) -> DecoderKnobs:
        """The knobs of the rest; raises SettingError before the prefill."""
        if self._chosen is None:
            raise SettingError("the knobs are chosen inside the prefill; run that first")
        return self._chosen

    def components(self) -> Mapping[Component, Sequence[nn.Module]]:
        """See `Stages.components`: not known before the choice."""
        return {}

    def encode_image(self, inputs: Mapping[str, Any]) -> MolmoeImageFeatures | None:
        """See `Stages.encode_image`."""
        return self._split.encode_image(inputs)

    def prefill(self, inputs: Mapping[str, Any], features: MolmoeImageFeatures | None) -> tuple[torch.Tensor, Any]:
        """See `Stages.prefill`."""
        states = self._split.begin(inputs, features, *self._requested)
        self._chosen = self._choose(states)
        return self._split.finish(self._chosen.top_k, self._chosen.blocks)

    def decoding(self) -> AbstractContextManager[None]:
        """See `Stages.decoding`."""
        return self._split.decoding()

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        """See `Stages.decode_step`."""
        return self._split.decode_step(token, state)


class AsyncPausedStages(PausedStages):
    """The same as `AsyncStages`, for steps that choose their token on the device."""

    def __init__(self, split: EnginePausedPrefill, *asked: Any) -> None:
        super().__init__(split, *asked)
        self._engine_stages = split
        self._state: PrefilledRequest[DecoderKnobs] | None = None

    @property
    def last_token(self) -> torch.Tensor:
        """See `AsyncStages`."""
        return self._engine_stages.last_token

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        """See `AsyncStages`."""
        logits, self._state = self.prefill(inputs, features)
        self._engine_stages.first_token(logits)

    def advance(self) -> None:
        """See `AsyncStages`."""
        assert self._state is not None
        self._engine_stages.advance(self._state)
