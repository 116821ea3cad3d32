"""A streamed answer: its pieces, when each came, and its tokens as far as the server tells them apart.

A server sends text. How many tokens that is, it says in `usage`; where each piece is one of them, the times between
pieces are those between tokens. Where several tokens come in one piece, no time between tokens is known, and the time
per token is the decode time over the tokens after the first.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from experiment_core_utils.models.common.answer_ends import AnswerEnds
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.requests import SpanName, TimedTokens

# Servers that tell thinking from the answer send it in a field of its own; metrics read it by these tags.
_THINKING = ("reasoning_content", "reasoning")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass
class PieceIds:
    """Numbers for texts: the ids of an answer's tokens, since a server sends none.

    An id is even; the one after it stands for the same text at the end of an answer.
    """

    _ids: dict[str, int] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  #: several answers may arrive at a time

    def of(self, texts: Sequence[str], *, ended: bool) -> tuple[int, ...]:
        """Ids of the texts of one answer, which are at least one.

        Args:
            ended: whether the server ended the answer before the limit.
        """
        ids = []
        with self._lock:
            for text in texts:
                if text not in self._ids:
                    self._ids[text] = 2 * len(self._texts)
                    self._texts.append(text)
                ids.append(self._ids[text])
        ids[-1] += ended
        return tuple(ids)

    def text(self, ids: Sequence[int]) -> str:
        """The texts of ids, joined."""
        return "".join(self._texts[each // 2] for each in ids)


class ServedEnds(AnswerEnds):
    """The ends of a server's answers: where the server says so."""

    def up_to_eos(self, token_ids: Sequence[int]) -> Sequence[int]:
        """All of them: the server sends nothing after the end."""
        return token_ids

    def _is_end(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids[-1] % 2)


def received(stream: Iterable[Any], marks: Marks, ids: PieceIds, server: str, hint: str = "") -> TimedTokens:
    """The answer that a stream of chat completion chunks brings, with a mark for each piece as it comes.

    The mark before the request was sent is set already. An end-of-sequence that `usage` counts comes without text, as
    the end of the answer. One piece of several tokens has no decode time.

    Args:
        server: named in errors.
        hint: the end of their messages.

    Raises:
        SampleError: the stream ends before the answer does.
    """
    arriving = _Arriving(marks)
    for chunk in stream:
        arriving.take(chunk)
    if arriving.finish_reason is None:
        raise SampleError(f"{server} broke off its answer after {counted(len(arriving.pieces), 'piece')}{hint}")
    return arriving.timed_tokens(ids)


@dataclass
class _Arriving:
    """An answer while it comes."""

    marks: Marks
    pieces: list[str] = field(default_factory=list)  #: those with text
    finish_reason: str | None = None
    usage: Any = None
    ends_alone: bool = False  #: whether the end came without text, and has a mark of its own
    _is_thinking: bool = False

    def take(self, chunk: Any) -> None:
        self.usage = getattr(chunk, "usage", None) or self.usage
        for choice in chunk.choices[:1]:
            piece = self._piece(choice.delta)
            is_end = choice.finish_reason is not None and self.finish_reason is None
            if piece:
                self.pieces.append(piece)
            if piece or is_end:
                self.marks.mark()
            if is_end:
                self.finish_reason, self.ends_alone = choice.finish_reason, not piece

    def _piece(self, delta: Any) -> str:
        """The text of a chunk, with the tags of thinking that begins or has ended."""
        thought = next((found for name in _THINKING if (found := getattr(delta, name, None))), "")
        said = getattr(delta, "content", None) or ""
        opening = _OPEN if thought and not self._is_thinking else ""
        closing = _CLOSE if said and self._is_thinking else ""
        self._is_thinking = bool(thought) or (self._is_thinking and not said)
        return f"{opening}{thought}{closing}{said}"

    def timed_tokens(self, ids: PieceIds) -> TimedTokens:
        """The answer that is there; takes the mark of its end back where that is no time of a token."""
        ended, usage = self.finish_reason != "length", self.usage
        hidden = self._hidden_tokens()
        tokens = None if usage is None else usage.completion_tokens - hidden
        if ended and self.ends_alone and tokens == len(self.pieces) + 1:
            texts, is_by_token = [*self.pieces, ""], True
        else:
            texts, is_by_token = _texts(self.pieces, tokens)
            # The end is a time of its own where tokens without text may have come behind the last piece.
            if self.ends_alone and self.pieces and (is_by_token or len(self.pieces) == 1):
                self.marks.unmark()
                self.ends_alone = False
        steps: list[SpanName] = ["decode"] * (len(self.pieces) + self.ends_alone - 1)
        prompt_tokens = None if usage is None else usage.prompt_tokens
        return TimedTokens(ids.of(texts, ended=ended), ("first_token", *steps), is_by_token, prompt_tokens, hidden)

    def _hidden_tokens(self) -> int:
        """Tokens of thinking that `usage` counts, where none of it was sent: they came before the first piece."""
        if _CLOSE in "".join(self.pieces) or self._is_thinking:
            return 0
        return getattr(getattr(self.usage, "completion_tokens_details", None), "reasoning_tokens", None) or 0


def _texts(pieces: Sequence[str], tokens: int | None) -> tuple[list[str], bool]:
    """The text of each token, and whether the pieces show it.

    Where they do not, the whole text is cut into as many parts of even length, so that answers of one text and one
    number of tokens are equal however they came. Without a number each piece counts as a token.
    """
    count = max(len(pieces) if tokens is None else tokens, 1)
    if count == max(len(pieces), 1):
        return list(pieces) or [""], True
    whole = "".join(pieces)
    places = [len(whole) * number // count for number in range(count + 1)]
    return [whole[begin:end] for begin, end in pairwise(places)], False
