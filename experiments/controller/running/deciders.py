"""The decisions of stage 1 and stage 2 for one request, by networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch

from experiment_core_utils.knobs.setting import Setting
from experiments.controller.knob_choices import decoder_part
from experiments.controller.networks.action_logits import ActionLogits
from experiments.controller.networks.two_stage import ActionSpace


@dataclass(frozen=True)
class FirstDecision:
    """Stage 1's decision, before the vision encoder."""

    tier: str
    pause: int  #: blocks of the prefill that run before stage 2, block 0 counted


# Stage 2's decision, at the pause, is a setting of the decoder's knobs alone.
Decisions = tuple[FirstDecision, Setting]


class Decider(Protocol):
    """The two stages for one request at a time."""

    def possible(self) -> Sequence[Decisions]:
        """All decisions that the two stages may make."""

    def first(self, ids: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor | None]:
        """Stage 1's decision, and the budget token [1, 1, H] for the end of the prompt; None for none.

        Args:
            ids: [T] of the prompt's text, on the host.
        """

    def rehearse(self) -> None:
        """Run the steps of `second` while the device is busy, so that the host's caches contain them afterwards."""

    def second(self, states: torch.Tensor) -> Setting:
        """Stage 2's decision, for the request of the last call of `first`.

        Args:
            states: [2, H] at the pause: of the prompt's last token, and of the budget token; without such a token
                the first row alone.
        """


class NetworkDecider:
    """The networks' decisions: the likeliest, or drawn where there is a generator.

    Args:
        logits: that the networks give.
        space: theirs.
        generator: of the CPU; None takes the likeliest.
    """

    def __init__(self, logits: ActionLogits, space: ActionSpace, generator: torch.Generator | None = None) -> None:
        self._logits = logits
        self._space = space
        self._generator = generator
        self._actions: list[int] = []
        # By the places of the levels; made beforehand, as `second` is timed.
        _, *later = map(range, map(len, space.knobs.levels))
        self._seconds = {places: decoder_part(space.knobs.at(0, *places)) for places in product(*later)}

    @property
    def seen(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Prompt [H], states [2, H] and actions (tier, pause, top-k, blocks) of the last request, on the CPU."""
        return (*self._logits.seen(), tuple(self._actions))

    def possible(self) -> Sequence[Decisions]:
        space, knobs = self._space, self._space.knobs
        return [
            (FirstDecision(tier, pause), second)
            for tier, (pause, left) in product(knobs.tiers, zip(space.pauses, space.possible, strict=True))
            for (_, blocks), second in self._seconds.items()
            if left[blocks]
        ]

    def first(self, ids: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor]:
        tier, pause = (self._pick(each) for each in self._logits.first(ids, budget_s))
        self._actions = [tier, pause]
        return FirstDecision(self._space.knobs.tiers[tier], self._space.pauses[pause]), self._logits.token()

    def rehearse(self) -> None:
        self._logits.rehearse()

    def second(self, states: torch.Tensor) -> Setting:
        tier, pause = self._actions[:2]
        places = tuple(self._pick(each) for each in self._logits.second(states, tier, pause))
        self._actions = [tier, pause, *places]
        return self._seconds[places]

    def _pick(self, logits: list[float]) -> int:
        if self._generator is None:
            return logits.index(max(logits))
        fractions = torch.tensor(logits).softmax(dim=-1)
        return int(torch.multinomial(fractions, 1, generator=self._generator))
