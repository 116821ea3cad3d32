"""How far logits may lie apart; the norm of (3, 4) is 5."""

import pytest
import torch

from experiment_core_utils.models.common.logits_check import refuse_other_logits
from experiment_core_utils.primitives.errors import KnobDidNotAct

EXPECTED = torch.tensor([[3.0, 4.0]])


def compared(off: float, dtype: torch.dtype, same_experts: bool = True) -> None:
    """The second logits off by so much of their norm."""
    found = EXPECTED + torch.tensor([[0.0, 5 * off]])
    both = {"first": EXPECTED, "second": found}
    refuse_other_logits(both, [EXPECTED, EXPECTED], "the modules", dtype, [True, same_experts])


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [(torch.float32, 0.0009, 0.0011), (torch.bfloat16, 0.04, 0.06), (torch.float16, 0.04, 0.06)],
    ids=str,
)
def test_rounding_may_differ_by_more_in_lower_precision(dtype: torch.dtype, within: float, beyond: float) -> None:
    compared(within, dtype)
    with pytest.raises(KnobDidNotAct, match="the second differs by"):
        compared(beyond, dtype)


def test_other_experts_allow_more_in_lower_precision_alone() -> None:
    compared(0.19, torch.bfloat16, same_experts=False)
    for off, dtype in ((0.21, torch.bfloat16), (0.0011, torch.float32)):
        with pytest.raises(KnobDidNotAct):
            compared(off, dtype, same_experts=False)


def test_the_message_says_what_differs_from_what_and_by_how_much() -> None:
    with pytest.raises(KnobDidNotAct, match="^the second differs by 50.0% from the modules$"):
        compared(0.5, torch.bfloat16)


def test_not_a_number_is_no_agreement() -> None:
    with pytest.raises(KnobDidNotAct):
        compared(float("nan"), torch.bfloat16)
