"""Greedy decoding by a model's three stages, with a mark where each stage ends.

`generate_greedily` waits for each token before it launches the next step. `generate_async` does not: it is for stages
that choose the next token on the device, as CUDA graphs do.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.primitives.device import Marks, TokenCopies
from experiment_core_utils.primitives.finite_logits import checked_tokens, usable_token
from experiment_core_utils.records.requests import FollowedAnswer, StageName, TimedBatch, TimedTokens


class GreedyStages(Protocol):
    """The three stages of a model, which are all that a greedy generation needs of it."""

    @property
    def ends(self) -> AnswerEnds:
        """What ends an answer."""

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """The vision stage; None for a request without a picture."""

    def prefill(self, inputs: Mapping[str, Any], features: Any) -> tuple[torch.Tensor, Any]:
        """The prefill stage: logits [1, V] of the last position, and the state for `decode_step`."""

    def decoding(self) -> AbstractContextManager[None]:
        """A context of consecutive decode steps, in which the model is switched once and not in each step.

        No prefill runs inside.
        """

    def decode_step(self, token: torch.Tensor, state: Any) -> torch.Tensor:
        """The decode stage: token [1, 1] -> logits [1, V]."""


def timed_vision(
    encode_image: Callable[[Mapping[str, Any]], Any], inputs: Mapping[str, Any], marks: Marks
) -> tuple[Any, list[StageName]]:
    """What the vision stage gives, and the stages so far: `vision`, or none without a picture.

    A mark is set where the request is handed over, and one where the stage ends.
    """
    marks.mark()
    features = encode_image(inputs)
    if features is None:
        return None, []
    marks.mark()
    return features, ["vision"]


@torch.inference_mode()
def generate_greedily(model: GreedyStages, inputs: Mapping[str, Any], max_new_tokens: int, marks: Marks) -> TimedTokens:
    """The greedy answer of at most `max_new_tokens` tokens, by the stages one after the other.

    The choice of a token and its copy to the host belong to the interval that it ends.

    Raises:
        GenerationFailed: logits are not finite.
    """
    features, spans = timed_vision(model.encode_image, inputs, marks)
    logits, state = model.prefill(inputs, features)
    # As in `generate()`, the switch is made while the device still runs the prefill, and belongs to that.
    with model.decoding():
        token = logits.argmax(dim=-1, keepdim=True)
        token_ids = [usable_token(int(checked_tokens(token, logits)))]
        marks.mark()
        spans.append("prefill")
        while len(token_ids) < max_new_tokens and not model.ends.are_reached(token_ids):
            logits = model.decode_step(token, state)
            token = logits.argmax(dim=-1, keepdim=True)
            token_ids.append(usable_token(int(checked_tokens(token, logits))))
            marks.mark()
            spans.append("decode")
    return TimedTokens(tuple(token_ids), tuple(spans))


class BatchAnswers:
    """Token ids of a batch's answers; rows whose answers have ended still run and are ignored.

    Args:
        tokens: the first of each answer, in any shape of B elements, as `checked_tokens` gives them.

    Raises:
        GenerationFailed: the logits of a token of an answer that has not ended were not finite.
    """

    def __init__(self, tokens: torch.Tensor, ends: AnswerEnds) -> None:
        self._answers: list[list[int]] = [[] for _ in range(tokens.numel())]
        self._ends = ends
        self._running = set(range(tokens.numel()))
        self.add(tokens)

    @property
    def have_ended(self) -> bool:
        """Whether every answer has come to its end."""
        return not self._running

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The ids of each answer, what ended it included."""
        return [tuple(answer) for answer in self._answers]

    def add(self, tokens: torch.Tensor) -> None:
        """Add the next token of each answer that has not ended, as `checked_tokens` gives them."""
        chosen = tokens.flatten().tolist()
        for row in tuple(self._running):
            self._answers[row].append(usable_token(chosen[row], row))
            if self._ends.are_reached(self._answers[row]):
                self._running.remove(row)


class BatchStages(Protocol):
    """Decode steps of a batch that was prefilled, which feed themselves on the device."""

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""

    @property
    def last_tokens(self) -> torch.Tensor:
        """The last token of each request [B] as `checked_tokens` gives it; the next step overwrites them."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step returns before it has run, so that the next one is launched before its tokens are read."""

    def advance(self) -> None:
        """A decode step of all requests from their last tokens, and the choice of the next."""


@torch.inference_mode()
def decode_together(
    stages: BatchStages, tokens: TokenCopies, ends: AnswerEnds, marks: Marks, *, has_picture: bool
) -> TimedBatch:
    """The answers of a batch from its first tokens on, which are chosen already, until every answer has ended.

    A mark is set after the copy of each step's tokens to the host, that of the prefill among them. Where steps run
    ahead, the one after the last token is launched in vain and comes after the last mark.

    Args:
        tokens: a place for each token that an answer may have; made before the first mark.
        has_picture: whether a mark stands between a vision stage and the prefill.

    Raises:
        GenerationFailed: logits are not finite.
    """
    max_new_tokens = len(tokens)
    answers: BatchAnswers | None = None
    spans: list[StageName] = ["vision", "prefill"] if has_picture else ["prefill"]

    def launch(place: int) -> None:
        if place:
            stages.advance()
        tokens.send(place, stages.last_tokens)
        marks.mark()

    launch(0)
    for place in range(max_new_tokens):
        is_last = place + 1 == max_new_tokens
        if stages.runs_ahead and not is_last:
            launch(place + 1)
        arrived = tokens.arrived(place)
        if answers is None:
            answers = BatchAnswers(arrived, ends)
        else:
            answers.add(arrived)
        if is_last:
            break
        if answers.have_ended:
            if stages.runs_ahead:
                marks.unmark()
            break
        if not stages.runs_ahead:
            launch(place + 1)
        spans.append("decode")
    assert answers is not None
    return TimedBatch(tuple(answers.token_ids), tuple(spans))


# Of each answer, whose logits are kept to be compared.
MOST_POSITIONS = 8


class BatchFollower:
    """Takes the logits of a batch along given answers, one position after the other.

    Args:
        answers: ids of each row, at least one.
    """

    def __init__(self, answers: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._lengths = [len(answer) for answer in answers]
        self.num_positions = max(self._lengths)
        # A row whose answer has ended goes on with its last token, and is ignored.
        filled = [[*answer, *[answer[-1]] * (self.num_positions - len(answer))] for answer in answers]
        self._tokens = torch.tensor(filled, device=device)
        self._likeliest: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    def follow(self, logits: torch.Tensor) -> torch.Tensor:
        """Note the logits [B, V] of the next position; returns the answers' tokens there, [B, 1]."""
        place = len(self._likeliest)
        self._likeliest.append(logits.argmax(dim=-1))
        if place < MOST_POSITIONS:
            self._logits.append(logits.float().clone())
        return self._tokens[:, place : place + 1]

    @property
    def followed(self) -> list[FollowedAnswer]:
        """What was noted of each row, up to the end of its answer."""
        likeliest, logits = torch.stack(self._likeliest, dim=1).tolist(), torch.stack(self._logits, dim=1)
        return [
            FollowedAnswer(tuple(likeliest[row][:length]), logits[row, :length])
            for row, length in enumerate(self._lengths)
        ]


class AsyncStages(BatchStages, Protocol):
    """Stages of one request that leave the likeliest token on the device, where the next step reads it."""

    runs_ahead: bool = True

    def encode_image(self, inputs: Mapping[str, Any]) -> Any:
        """The vision stage; None for a request without a picture."""

    def begin(self, inputs: Mapping[str, Any], features: Any) -> None:
        """The prefill, and the choice of the first token."""


@torch.inference_mode()
def generate_async(
    stages: AsyncStages,
    inputs: Mapping[str, Any],
    max_new_tokens: int,
    ends: AnswerEnds,
    marks: Marks,
) -> TimedTokens:
    """The answer of `generate_greedily`, where each step is launched before the token before it is read; marks as in
    `decode_together`.

    Raises:
        GenerationFailed: logits are not finite.
    """
    tokens = TokenCopies(stages.device, max_new_tokens, rows=1)
    features, _ = timed_vision(stages.encode_image, inputs, marks)
    stages.begin(inputs, features)
    return decode_together(stages, tokens, ends, marks, has_picture=features is not None).first
