"""How far logits may lie apart; the norm of (3, 4) is 5."""

import pytest
import torch

from experiment_core_utils.models.replayed_logits import refuse_other_logits
from experiment_core_utils.primitives.errors import KnobDidNotAct

EXPECTED = torch.tensor([[3.0, 4.0]])


def compared(off: float, dtype: torch.dtype) -> None:
    """The second logits off by so much of their norm."""
    found = EXPECTED + torch.tensor([[0.0, 5 * off]])
    refuse_other_logits({"first": EXPECTED, "second": found}, [EXPECTED, EXPECTED], "the modules", dtype)


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"), [(torch.float32, 0.0009, 0.0011), (torch.bfloat16, 0.19, 0.21)], ids=str
)
def test_rounding_may_differ_by_more_in_lower_precision(dtype: torch.dtype, within: float, beyond: float) -> None:
    compared(within, dtype)
    with pytest.raises(KnobDidNotAct, match="the second differs by"):
        compared(beyond, dtype)


def test_the_message_says_what_differs_from_what_and_by_how_much() -> None:
    with pytest.raises(KnobDidNotAct, match="^the second differs by 50.0% from the modules$"):
        compared(0.5, torch.bfloat16)


def test_not_a_number_is_no_agreement() -> None:
    with pytest.raises(KnobDidNotAct):
        compared(float("nan"), torch.bfloat16)
