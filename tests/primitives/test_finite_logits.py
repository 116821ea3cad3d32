"""Which logits count as not finite, and how it is said."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from experiment_core_utils.primitives.errors import GenerationFailed
from experiment_core_utils.primitives.finite_logits import (
    NOT_FINITE,
    LogitsNotFinite,
    checked_tokens,
    failure_named,
    logits_watched,
    refuse_not_finite,
    usable_token,
)

NAN, INF = float("nan"), float("inf")
# Usable: the second and the last, in which single tokens are ruled out.
ROWS = torch.tensor([[1.0, NAN, 3.0], [2.0, -1.0, 0.5], [0.0, 1.0, INF], [-INF] * 3, [NAN] * 3, [-INF, 4.0, -INF]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_token_is_checked_by_its_logit(dtype: torch.dtype) -> None:
    logits = ROWS.to(dtype)
    for shape in ((6, 1), (6,)):
        tokens = logits.argmax(dim=-1).view(shape)
        found = checked_tokens(tokens, logits)
        assert found.shape == shape
        assert found.flatten().tolist() == [NOT_FINITE, 0, NOT_FINITE, NOT_FINITE, NOT_FINITE, 1]
        assert tokens.min() >= 0  # what the next step reads stays a token
    for row in range(6):
        if row in (1, 5):
            refuse_not_finite(logits[row : row + 1])
        else:
            with pytest.raises(GenerationFailed, match="^logits are not finite$"):
                refuse_not_finite(logits[1:2], logits[row : row + 1])


def test_a_token_is_usable_or_generation_failed() -> None:
    assert usable_token(0) == 0
    with pytest.raises(GenerationFailed, match="^logits are not finite$"):
        usable_token(NOT_FINITE)
    with pytest.raises(LogitsNotFinite) as caught:
        usable_token(NOT_FINITE, row=2)
    assert caught.value.row == 2


class Scripted(nn.Module):
    """Three rows; each pass gives the next of two positions' logits."""

    def __init__(self, *steps: torch.Tensor) -> None:
        super().__init__()
        self._steps = iter(steps)

    def forward(self) -> CausalLMOutputWithPast:
        last = next(self._steps)
        return CausalLMOutputWithPast(logits=torch.stack([torch.full_like(last, NAN), last], dim=1))


def test_rows_are_watched_up_to_their_own_end() -> None:
    """The first row's second token and the third row's third token are spoilt; only last positions count."""
    steps = ROWS[[1, 5, 1]], ROWS[[0, 5, 1]], ROWS[[1, 5, 3]]
    model = Scripted(*steps, ROWS[[0, 0, 0]])
    with logits_watched(model) as watch:
        for _ in range(3):
            model()
    assert model().logits is not None  # it is no longer watched
    assert watch.rows_not_finite([3, 3, 3]) == [0, 2]
    assert watch.rows_not_finite([1, 3, 3]) == [2]
    assert watch.rows_not_finite([1, 3, 2]) == []
    watch.refuse_not_finite([1, 3, 2])
    for lengths, row in (([2, 1, 1], 0), ([1, 3, 3], 2)):
        with pytest.raises(LogitsNotFinite) as caught:
            watch.refuse_not_finite(lengths)
        assert caught.value.row == row


def test_a_token_can_be_drawn_from_what_is_repaired() -> None:
    model = Scripted(ROWS[[0, 1, 3]])
    with logits_watched(model, repairs=True) as watch:
        repaired = model().logits[:, -1]
    assert torch.equal(repaired, torch.tensor([[0.0] * 3, [2.0, -1.0, 0.5], [0.0] * 3]))
    assert watch.rows_not_finite([1, 1, 1]) == [0, 2]


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        ("float16", "float16 overflows; give --precision bfloat16 or float32"),
        ("bfloat16", "bfloat16; give --precision float32, or check the weights"),
        ("float32", "float32; check the weights and how they were converted"),
        (None, "precision not known; give --precision float32, or check the weights"),
    ],
)
def test_a_failure_names_its_place_and_the_remedy(dtype: str | None, remedy: str) -> None:
    with pytest.raises(GenerationFailed) as caught, failure_named("sample 7", lambda: {"dtype": dtype}):
        usable_token(NOT_FINITE)
    assert str(caught.value) == f"logits are not finite at sample 7 ({remedy})"
