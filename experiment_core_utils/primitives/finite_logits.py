"""Logits that are not finite, found where tokens are chosen, and read back with the tokens.

Of a token's logits only the largest is looked at: it is not finite where one of them is NaN or positive infinity, or
where all are negative infinity, as no token can be chosen then. Single ones may be negative infinity by design.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from experiment_core_utils.primitives.errors import GenerationFailed

# In place of the id of a token whose logits are not finite.
NOT_FINITE = -1
_MESSAGE = "logits are not finite"


class LogitsNotFinite(GenerationFailed):
    """Logits from which a token was to be chosen are not finite."""

    row = 0  #: of a batch, the first one whose they are


def _not_finite(row: int = 0) -> LogitsNotFinite:
    error = LogitsNotFinite(_MESSAGE)
    error.row = row
    return error


def checked_tokens(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A copy of the likeliest tokens, of B elements in any shape, with `NOT_FINITE` where logits [B, V] are not finite.

    It is computed on their device without waiting for it, so that a CUDA graph can contain it.

    Args:
        tokens: `logits.argmax(dim=-1)`, which finds what is not finite first.
    """
    largest = logits.gather(-1, tokens.reshape(-1, 1)).view_as(tokens)
    # x - x is 0 for what is finite and NaN for the rest.
    return tokens.masked_fill(largest - largest != 0, NOT_FINITE)


def usable_token(token: int, row: int = 0) -> int:
    """The token that `checked_tokens` gave for a row of a batch; raises LogitsNotFinite for `NOT_FINITE`."""
    if token == NOT_FINITE:
        raise _not_finite(row)
    return token


def refuse_not_finite(*logits: torch.Tensor) -> None:
    """Raises LogitsNotFinite where any of these logits [B, V] are not finite; waits for the device."""
    if not all(bool(each.amax(dim=-1).isfinite().all()) for each in logits):
        raise _not_finite()


class LogitsWatch:
    """The largest logit of each row in each pass of a model, kept on its device.

    Args:
        repairs: whether logits that are not finite are replaced by zeros, from which a token can be drawn: drawing from
            others is an error that a GPU does not recover from.
    """

    def __init__(self, repairs: bool = False) -> None:
        self._repairs = repairs
        self._largest: list[torch.Tensor] = []

    def __call__(self, _module: Any, _inputs: Any, output: Any) -> None:
        """The model's forward hook."""
        last = output.logits[:, -1]
        largest = last.amax(dim=-1)
        self._largest.append(largest)
        if self._repairs:
            output.logits = torch.where(largest.isfinite()[:, None], last, torch.zeros_like(last))[:, None]

    def rows_not_finite(self, lengths: Sequence[int]) -> list[int]:
        """Rows of which the logits of a token were not finite; what comes after a row's own answer is ignored.

        Args:
            lengths: tokens of the answer of each row.
        """
        if not self._largest:
            return []
        finite = torch.stack(self._largest).isfinite().tolist()
        return [row for row, length in enumerate(lengths) if not all(step[row] for step in finite[:length])]

    def refuse_not_finite(self, lengths: Sequence[int]) -> None:
        """Raises LogitsNotFinite where there are `rows_not_finite`."""
        if rows := self.rows_not_finite(lengths):
            raise _not_finite(rows[0])


@contextmanager
def logits_watched(model: nn.Module, repairs: bool = False) -> Iterator[LogitsWatch]:
    """A context in which the logits of a model's `generate()` are watched."""
    watch = LogitsWatch(repairs)
    handle = model.register_forward_hook(watch)
    try:
        yield watch
    finally:
        handle.remove()


@contextmanager
def failure_named(place: str, describe: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """A context in which GenerationFailed names the place (`sample 3`) and what to do about it.

    Args:
        describe: gives, under `dtype`, what the model computes in, such as `float16`.
    """
    try:
        yield
    except GenerationFailed as error:
        raise GenerationFailed(f"{error} at {place} ({remedy(describe().get('dtype'), '--precision ')})") from error


def remedy(dtype: str | None, option: str) -> str:
    """What to do where the logits of a model that computes in `dtype` are not finite.

    Args:
        option: what comes before the name of another precision, such as `--precision `.
    """
    if dtype == "float16":
        return f"float16 overflows; give {option}bfloat16 or float32"
    if dtype == "float32":
        return "float32; check the weights and how they were converted"
    return f"{dtype or 'precision not known'}; give {option}float32, or check the weights"
