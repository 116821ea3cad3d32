"""A streamed answer: its pieces, when each came, and its tokens as far as the server tells them apart.

A server sends text. How many tokens that is, it says in `usage`; where each piece is one of them, the times between
pieces are those between tokens. Where several tokens come in one piece, no time between tokens is known, and the time
per token is the decode time over the tokens after the first.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from experiment_core_utils.engines.answer_ends import AnswerEnds
from experiment_core_utils.models.endpoint.chunks import Chunk, FinishReason, count_in, finish_reason_of
from experiment_core_utils.models.endpoint.client import AnswerIsOver, Bounds
from experiment_core_utils.primitives.device import Marks
from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.texts import counted, shown
from experiment_core_utils.records.requests import ServedNotes, SpanName, TimedTokens

# Servers that tell thinking from the answer send it apart; metrics read it by these tags.
_OPEN, _CLOSE = "<think>", "</think>"
# Tokens that are no text: marks of a template, the end.
_TOKENS_WITHOUT_TEXT = 16


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


@dataclass
class ArrivingAnswer:
    """An answer while its chunks come, with a mark for each piece as it comes.

    The mark before the request was sent is set already. An end-of-sequence that `usage` counts comes without text, as
    the end of the answer. One piece of several tokens has no decode time.
    """

    where: str  #: the server, named in errors
    marks: Marks
    bounds: Bounds
    pieces: list[str] = field(default_factory=list)  #: those with text
    finish_reason: FinishReason | None = None
    _usage: Any = None
    _answered_by: str | None = None
    _ends_alone: bool = False  # whether the end came without text, and has a mark of its own
    _is_thinking: bool = False
    _num_chunks: int = 0
    _num_letters: int = 0

    def take(self, chunk: Chunk) -> None:
        """The next chunk.

        Raises:
            SampleError: more came than was asked for, text behind the end, or an end that is none of an answer.
            AnswerIsOver: more came than was asked for behind the end, which is no part of the answer.
        """
        self._num_chunks += 1
        if self._usage is None or count_in(chunk.usage, "completion_tokens") is not None:
            self._usage = chunk.usage
        if self._answered_by is None and chunk.model:
            self._answered_by = shown(chunk.model)
        choice = chunk.first
        if self._num_chunks > self.bounds.pieces or self._num_letters > self.bounds.letters:
            if self.finish_reason is not None:
                raise AnswerIsOver
            self._refuse_too_much()
        if choice is None:
            return
        piece = "" if choice.delta is None else self._piece(choice.delta.thought, choice.delta.said)
        reason = finish_reason_of(choice, self.where)
        if self.finish_reason is not None:
            if reason not in (None, self.finish_reason):
                raise SampleError(f"{self.where} ended its answer twice, by {self.finish_reason} and {reason}")
            reason = None
        if piece:
            if self.finish_reason is not None:
                raise SampleError(f"{self.where} sent more text behind the end of its answer")
            self.pieces.append(piece)
            self._num_letters += len(piece)
        if piece or reason:
            self.marks.mark()
        if reason:
            self.finish_reason, self._ends_alone = reason, not piece

    def _refuse_too_much(self) -> None:
        much = counted(self._num_chunks, "piece") if self._num_letters <= self.bounds.letters else "more text"
        raise SampleError(
            f"{self.where} sent {much} where at most {counted(self.bounds.tokens, 'token')} were asked for; it does "
            "not follow max_tokens"
        )

    def _piece(self, thought: str, said: str) -> str:
        """The text of a chunk, with the tags of thinking that begins or has ended."""
        if not thought and not self._is_thinking:
            return said
        opening = _OPEN if thought and not self._is_thinking else ""
        closing = _CLOSE if said and (self._is_thinking or thought) else ""
        self._is_thinking = not said and (bool(thought) or self._is_thinking)
        return f"{opening}{thought}{closing}{said}"

    def timed_tokens(self, ids: PieceIds, asked_name: str) -> TimedTokens:
        """The answer that is there; takes the mark of its end back where that is no time of a token.

        Args:
            asked_name: of the model that was asked.

        Raises:
            SampleError: its server counts more tokens than any answer of these bounds has.
        """
        ended = self.finish_reason != "length"
        tokens, hidden, are_possible = self._counts()
        if ended and self._ends_alone and tokens == len(self.pieces) + 1:
            texts, is_by_token = [*self.pieces, ""], True
        else:
            texts, is_by_token = _texts(self.pieces, tokens)
            # The end is a time of its own where tokens without text may have come behind the last piece.
            if self._ends_alone and self.pieces and (is_by_token or len(self.pieces) == 1):
                self.marks.unmark()
                self._ends_alone = False
        number = len(self.pieces) + self._ends_alone
        # A token that came in several pieces is there with the last of them.
        steps: list[SpanName] = ["decode" if len(texts) > 1 else "first_token"] * (number - 1)
        prompt_tokens = count_in(self._usage, "prompt_tokens") or None
        notes = ServedNotes(
            answered_by=None if self._answered_by == asked_name else self._answered_by,
            is_counted=tokens is not None,
            are_counts_possible=are_possible,
            is_recut=tokens is not None and 0 < tokens < len(self.pieces),
            is_too_long=tokens is not None and tokens > self.bounds.tokens,
            cached_tokens=count_in(self._usage, "prompt_tokens_details", "cached_tokens"),
        )
        token_ids = ids.of(texts, ended=ended)
        return TimedTokens(token_ids, ("first_token", *steps), is_by_token, prompt_tokens, hidden, notes)

    def _counts(self) -> tuple[int | None, int, bool]:
        """Tokens of the answer by `usage`, None without a count that can be; tokens of thinking that it counts where
        none of it was sent, which came before the first piece; and whether all that it counts can be.
        """
        given = self._usage if isinstance(self._usage, Mapping) else {}
        whole, prompt = (count_in(given, name) for name in ("completion_tokens", "prompt_tokens"))
        if whole is not None and whole > self.bounds.pieces:
            raise SampleError(
                f"{self.where} counts {whole} tokens of an answer where at most {self.bounds.tokens} were asked for"
            )
        thought = count_in(given, "completion_tokens_details", "reasoning_tokens") or 0
        was_sent = self._is_thinking or _CLOSE in "".join(self.pieces)
        hidden = 0 if was_sent or whole is None or thought > whole else thought
        letters = len("".join(self.pieces).encode("utf-8", "replace"))
        most = max(self.bounds.tokens, letters) + _TOKENS_WITHOUT_TEXT
        tokens = None if whole is None or not bool(self.pieces) <= whole - hidden <= most else whole - hidden
        are_read = (tokens is not None or given.get("completion_tokens") is None) and (
            bool(prompt) or given.get("prompt_tokens") is None
        )
        details = given.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        are_read = are_read and (cached is None or count_in(details, "cached_tokens") is not None)
        return tokens, 0 if tokens is None else hidden, are_read and thought <= (whole or thought)


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
