"""Decisions that no network makes."""

from collections.abc import Sequence

import torch

from experiment_core_utils.knobs.setting import Setting
from experiments.controller.knob_choices import decoder_part, tier_of
from experiments.controller.running.deciders import Decisions, FirstDecision


class FixedDecider:
    """The same decisions for every request, without a budget token: a static setting on the adaptive path."""

    def __init__(self, choice: Setting, pause: int) -> None:
        self._first = FirstDecision(tier_of(choice), pause)
        self._second = decoder_part(choice)

    def possible(self) -> Sequence[Decisions]:
        """See `Decider.possible`."""
        return [(self._first, self._second)]

    def first(self, ids: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor | None]:
        """See `Decider.first`."""
        return self._first, None

    def rehearse(self) -> None:
        """See `Decider.rehearse`; there is nothing to rehearse."""

    def second(self, states: torch.Tensor) -> Setting:
        """See `Decider.second`."""
        return self._second
