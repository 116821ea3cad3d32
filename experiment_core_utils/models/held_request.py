"""In: memory of fixed size that holds one request, and states of requests; out: which of them may be decoded from.

A state holds no keys and values itself, only where its request stands; it is lost with the next request. A prefill that
pauses has the place from its beginning on, and loses it in the same way.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from experiment_core_utils.primitives.errors import SettingError

Setting = TypeVar("Setting", bound=Hashable)


@dataclass
class HeldRequest(Generic[Setting]):
    """What `decode_step` needs between tokens.

    Attributes:
        setting: at which the prompt ran.
        prompt: [1, T]; another state of the same tensor at the same setting and pause has filled the same slots.
        length: slots in use.
        pause: blocks that ran before the setting was chosen, with the model's own knobs; 0 where it ran as a whole.
    """

    setting: Setting
    prompt: torch.Tensor
    length: int
    pause: int = 0


@dataclass(frozen=True)
class BegunRequest:
    """A prefill whose first `pause` blocks have run over a prompt [1, T]."""

    prompt: torch.Tensor
    pause: int


class RequestHolder(Generic[Setting]):
    """Who holds the one place there is.

    Args:
        place: its name, for errors.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._held: HeldRequest[Setting] | None = None
        self._begun: BegunRequest | None = None

    @property
    def is_held(self) -> bool:
        """Whether some state can be decoded from."""
        return self._held is not None

    def release(self) -> None:
        """No state can be decoded from, and no beginning be finished, any more."""
        self._held = self._begun = None

    def hold(self, setting: Setting, prompt: torch.Tensor, pause: int = 0) -> HeldRequest[Setting]:
        """The state of a request behind its prompt [1, T], which is in the slots."""
        self._held, self._begun = HeldRequest(setting, prompt, prompt.shape[1], pause), None
        return self._held

    def begin(self, prompt: torch.Tensor, pause: int) -> None:
        """The first `pause` blocks have filled their slots with a prompt [1, T]; the others are to follow."""
        self._held, self._begun = None, BegunRequest(prompt, pause)

    @property
    def begun(self) -> BegunRequest:
        """What was begun last, as long as nothing else came into the place; SettingError where that is so."""
        if self._begun is None:
            raise SettingError(
                f"{self._place} holds no prefill that was begun: another request came in between, or it was finished; "
                "begin it again"
            )
        return self._begun

    def resume(self, state: HeldRequest[Setting]) -> None:
        """Give the place to a state: the one that has it, or one whose prompt ran in the same way.

        What stands in the slots behind the state's length is the caller's to forget.

        Raises:
            SettingError: another request is in the slots.
        """
        held = self._held
        if held is not state:
            is_same = (
                held is not None
                and held.prompt is state.prompt
                and (held.setting, held.pause) == (state.setting, state.pause)
            )
            if not is_same or state.length != state.prompt.shape[1]:
                raise SettingError(f"{self._place} holds another request by now; prefill this one again")
            self._held = state
