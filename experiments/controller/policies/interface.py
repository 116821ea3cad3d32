"""The interface of policies: they choose the knobs of a request from its features and a latency budget."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MOST_SECONDS

DRAWS = 2**64


@dataclass(frozen=True)
class PictureShape:
    """The sizes of a picture at a vision target; both 0 without a picture."""

    crops: int  #: without the overview
    vision_tokens: int  #: image features that enter the language model


@dataclass(frozen=True)
class RequestFeatures:
    """A request as a policy sees it, before anything of it has run."""

    task: str
    sample_id: int  #: in the task's split; with the task it names the request
    text_tokens: int  #: of the prompt, without image features and markers
    #: `Setting.vision` -> what the picture becomes; contains every value that may be chosen
    shapes: Mapping[str, PictureShape]
    output_tokens: float | None  #: expected of the answer; None where nothing is known of it
    prompt: str | None = None  #: the text of the prompt; None where the results do not contain it


class Policy(Protocol):
    """Chooses all knobs of a request at once."""

    @property
    def name(self) -> str:
        """Name of the policy in tables: one word or a few joined by `_`."""

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        """The knobs that the request runs at, so that its `T_total` stays within the budget.

        Raises:
            ConfigurationError: a budget that is not above 0.
        """


def check_budget(budget_s: float) -> None:
    """Raises ConfigurationError unless the budget is above 0 and at most `MOST_SECONDS`."""
    if not 0.0 < budget_s <= MOST_SECONDS:
        raise ConfigurationError(
            f"a latency budget of {1000 * budget_s:g} ms is not possible; give one above 0 and at most "
            f"{1000 * MOST_SECONDS:g}"
        )


@dataclass(frozen=True)
class StaticPolicy:
    """A policy with the same choice for every request and budget."""

    choice: Setting

    @property
    def name(self) -> str:
        return f"static_{self.choice.key}"

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        check_budget(budget_s)
        return self.choice


@dataclass(frozen=True)
class RandomPolicy:
    """A policy of equally likely choices; what a request gets at a budget depends on these and the seed only."""

    choices: tuple[Setting, ...]
    seed: int
    name: str = "random"

    def choose(self, request: RequestFeatures, budget_s: float) -> Setting:
        check_budget(budget_s)
        return self.choices[draw_of(request, budget_s, self.seed) % len(self.choices)]


def draw_of(request: RequestFeatures, budget_s: float, seed: int = 0) -> int:
    """An evenly drawn number below `DRAWS`, always the same for the same request, budget and seed."""
    text = f"{seed} {request.task} {request.sample_id} {budget_s!r}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
