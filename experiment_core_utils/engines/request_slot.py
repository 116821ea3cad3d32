"""The slot of the one request that a KV cache of fixed size contains, and which states may be decoded from.

A state contains no keys and values, only the position of its request; it becomes invalid with the next request. A
paused prefill takes the slot when it begins, and loses it in the same way.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from experiment_core_utils.primitives.errors import SettingError

Setting = TypeVar("Setting", bound=Hashable)


@dataclass
class PrefilledRequest(Generic[Setting]):
    """The state that `decode_step` needs between tokens."""

    setting: Setting  #: at which the prompt ran
    #: [1, T]; another state of the same tensor at the same setting and pause has filled the same cache
    prompt: torch.Tensor
    length: int  #: positions of the KV cache in use
    #: blocks that ran before the setting was chosen, with the model's own knobs; 0 where it ran as a whole
    pause: int = 0
    num_dropped: int = 0  #: tokens of the prompt that never entered the decoder


@dataclass(frozen=True)
class PausedRequest:
    """A prefill whose first `pause` blocks have run over a prompt [1, T]."""

    prompt: torch.Tensor
    pause: int


class RequestSlot(Generic[Setting]):
    """The state that the one request slot contains.

    Args:
        place: its name, for errors.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._prefilled: PrefilledRequest[Setting] | None = None
        self._paused_request: PausedRequest | None = None

    @property
    def has_prefilled_request(self) -> bool:
        """Whether some state can be decoded from."""
        return self._prefilled is not None

    def release(self) -> None:
        """Invalidate all states: none can be decoded from, and no paused prefill can be finished."""
        self._prefilled = self._paused_request = None

    def occupy(
        self, setting: Setting, prompt: torch.Tensor, pause: int = 0, num_dropped: int = 0
    ) -> PrefilledRequest[Setting]:
        """The state of a request after its prompt [1, T], whose keys and values are in the KV cache."""
        length = prompt.shape[1] - num_dropped
        self._prefilled, self._paused_request = PrefilledRequest(setting, prompt, length, pause, num_dropped), None
        return self._prefilled

    def begin(self, prompt: torch.Tensor, pause: int) -> None:
        """Note that the first `pause` blocks have filled their part of the KV cache with a prompt [1, T]."""
        self._prefilled, self._paused_request = None, PausedRequest(prompt, pause)

    @property
    def paused_request(self) -> PausedRequest:
        """The last paused prefill; raises SettingError where another request has taken the slot since."""
        if self._paused_request is None:
            raise SettingError(
                f"{self._place} has no paused prefill: another request came in between, or it was finished; start "
                f"it again"
            )
        return self._paused_request

    def resume(self, state: PrefilledRequest[Setting]) -> None:
        """Give the slot to a state: the one that has it, or one whose prompt ran in the same way.

        The caller must ignore what is in the KV cache after the state's length.

        Raises:
            SettingError: another request is in the KV cache.
        """
        current = self._prefilled
        if current is not state:
            is_same = (
                current is not None
                and current.prompt is state.prompt
                and (current.setting, current.pause, current.num_dropped)
                == (state.setting, state.pause, state.num_dropped)
            )
            if not is_same or state.length != state.prompt.shape[1] - state.num_dropped:
                raise SettingError(f"{self._place} is used by another request now; prefill this one again")
            self._prefilled = state
