"""Which states of one place can be decoded from."""

import pytest
import torch

from experiment_core_utils.engines.request_slot import PrefilledRequest, RequestSlot
from experiment_core_utils.primitives.errors import SettingError

PROMPT = torch.tensor([[4, 5, 6]])


def test_a_state_begins_after_its_prompt_and_continues() -> None:
    holder = RequestSlot[str]("the place")
    state = holder.occupy("a", PROMPT)
    assert state == PrefilledRequest("a", PROMPT, 3)
    state.length += 2
    holder.resume(state)


@pytest.mark.parametrize(
    ("setting", "prompt", "length"),
    [("b", PROMPT, 3), ("a", PROMPT.clone(), 3), ("a", PROMPT, 4)],
    ids=["setting", "prompt", "behind a step"],
)
def test_only_a_state_behind_the_same_prompt_takes_the_place_over(
    setting: str, prompt: torch.Tensor, length: int
) -> None:
    holder = RequestSlot[str]("the place")
    first, second = holder.occupy("a", PROMPT), holder.occupy("a", PROMPT)
    holder.resume(first)
    holder.resume(second)
    with pytest.raises(SettingError, match="^the place is used by another request now; prefill this one again$"):
        holder.resume(PrefilledRequest(setting, prompt, length))
    holder.resume(second)


def test_a_prompt_that_ran_with_another_pause_is_another_request() -> None:
    """Blocks in front of a pause run with the model's own knobs, so they leave other keys."""
    holder = RequestSlot[str]("the place")
    whole = holder.occupy("a", PROMPT)
    first, second, later = (holder.occupy("a", PROMPT, pause) for pause in (2, 2, 3))
    for lost in (whole, first, second):
        with pytest.raises(SettingError, match="is used by another request"):
            holder.resume(lost)
    holder.resume(later)
    again = holder.occupy("a", PROMPT, 2)
    holder.resume(first)
    holder.resume(again)


def test_nothing_resumes_from_an_empty_slot() -> None:
    holder = RequestSlot[str]("the place")
    assert not holder.has_prefilled_request
    state = holder.occupy("a", PROMPT)
    assert holder.has_prefilled_request
    holder.release()
    with pytest.raises(SettingError, match="is used by another request"):
        holder.resume(state)
