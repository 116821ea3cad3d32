"""In: what a request shows at each stage; out: stage 1's and stage 2's decision, by networks or as scripted."""

from dataclasses import dataclass
from typing import Protocol

import torch

from experiments.controller.knob_choices import KnobChoice
from experiments.controller.two_stage_networks import TwoStageNetworks


@dataclass(frozen=True)
class FirstDecision:
    """Before the vision encoder.

    Attributes:
        pause: blocks of the prefill that run before stage 2, block 0 counted.
    """

    tier: str
    pause: int


@dataclass(frozen=True)
class SecondDecision:
    """Behind the pause; see `KnobChoice`."""

    top_k: int
    num_active_blocks: int


class Decider(Protocol):
    """The two stages for one request at a time."""

    def first(self, prompt: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor | None]:
        """Stage 1, and the budget token [1, 1, H] to stand behind the prompt; None for none.

        Args:
            prompt: [H], mean embedding of the prompt's text.
        """
        ...

    def second(self, states: torch.Tensor) -> SecondDecision:
        """Stage 2, for the request that `first` was called for last.

        Args:
            states: [2, H] behind the pause: of the prompt's last token, and of the budget token; without such a token
                the first row alone.
        """
        ...


class FixedDecider:
    """The same for every request, without a budget token: what a static setting does on the adaptive path."""

    def __init__(self, choice: KnobChoice, pause: int) -> None:
        self._choice = choice
        self._pause = pause

    def first(self, prompt: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor | None]:
        """See `Decider.first`."""
        return FirstDecision(self._choice.tier, self._pause), None

    def second(self, states: torch.Tensor) -> SecondDecision:
        """See `Decider.second`."""
        return SecondDecision(self._choice.top_k, self._choice.num_active_blocks)


class NetworkDecider:
    """The networks' decisions: the likeliest, or drawn where there is a generator.

    Args:
        networks: on the model's device.
        generator: of the CPU; None takes the likeliest.

    Attributes:
        seen: prompt [H], states [2, H] and actions (tier, pause, top-k, blocks) of the last request, on the CPU.
    """

    def __init__(self, networks: TwoStageNetworks, generator: torch.Generator | None = None) -> None:
        self._networks = networks
        self._generator = generator
        self._prompt = torch.empty(0)
        self._states = torch.empty(0)
        self._actions: list[int] = []

    @property
    def seen(self) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """See the class."""
        return self._prompt.float().cpu(), self._states.float().cpu(), tuple(self._actions)

    @torch.inference_mode()
    def first(self, prompt: torch.Tensor, budget_s: float) -> tuple[FirstDecision, torch.Tensor]:
        """See `Decider.first`."""
        code = self._networks.code_of(torch.tensor([budget_s], dtype=torch.float64))
        token = self._networks.budget.token(code)
        tier, pause = self._networks.split_first(self._networks.first(prompt[None], code)[0].cpu())
        self._prompt, self._actions = prompt, [self._pick(tier), self._pick(pause)]
        space = self._networks.space
        return FirstDecision(space.knobs.tiers[self._actions[0]], space.pauses[self._actions[1]]), token[None]

    @torch.inference_mode()
    def second(self, states: torch.Tensor) -> SecondDecision:
        """See `Decider.second`."""
        chosen = torch.tensor([self._actions[:2]]).to(states.device)
        top_k, blocks = self._networks.split_second(self._networks.second(states[None], chosen)[0].cpu())
        self._states, self._actions = states, [*self._actions[:2], self._pick(top_k), self._pick(blocks)]
        knobs = self._networks.space.knobs
        return SecondDecision(knobs.top_ks[self._actions[2]], knobs.block_counts[self._actions[3]])

    def _pick(self, log_odds: torch.Tensor) -> int:
        if self._generator is None:
            return int(log_odds.argmax())
        return int(torch.multinomial(log_odds.exp(), 1, generator=self._generator))
