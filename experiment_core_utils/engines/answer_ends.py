"""How an answer ends before the limit of tokens: at an end-of-sequence, or at a stop text."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import StoppingCriteria

from experiment_core_utils.tasks.answers import (
    CHANNEL,
    CHANNEL_MARKS,
    answer_in,
    before_stop,
    is_in_thinking,
    is_thinking_opened_by,
    marks_in,
    next_mark,
    places_of_stops,
    thinking_spans,
    up_to_stop,
)

TextOf = Callable[[Sequence[int]], str]
# A tag in bytes and the white space behind it have no more.
_TOKENS_OF_A_TAG = 32
# A character in UTF-8 has at most four bytes, each of which may be a token.
_PARTS = 4


@dataclass(frozen=True)
class ThinkingLimit:
    """The number of tokens after which a thought is closed, and by which tokens."""

    tokens: int
    closing: tuple[int, ...]  #: what ends a thought that goes on
    empty: tuple[int, ...]  #: a whole thought of nothing, where 0 tokens are allowed


@dataclass(frozen=True)
class AnswerEnds:
    """What ends the answers of one model; without anything, only the limit of tokens does.

    Args:
        text_of: text of generated ids, special tokens left out but those around thinking; None where no text is read.
    """

    token_ids: frozenset[int] = frozenset()  #: end-of-sequence tokens
    stop: tuple[str, ...] = ()  #: texts
    text_of: TextOf | None = None
    are_ignored: bool = False  #: whether generation goes on to the limit whatever comes (`--ignore_eos`)
    is_thinking_open: bool = False  #: whether prompts end inside thinking
    thinking: ThinkingLimit | None = None  #: None where a thought is as long as the model makes it

    def after(self, prompt_ids: Sequence[int]) -> "AnswerEnds":
        """The ends of the answer to one prompt, which may end inside thinking."""
        if self.text_of is None:
            return self
        return replace(self, is_thinking_open=is_thinking_opened_by(self.text_of(prompt_ids[-_TOKENS_OF_A_TAG:])))

    def are_reached(self, token_ids: Sequence[int]) -> bool:
        """Whether generation ends with the last of these tokens."""
        return not self.are_ignored and self._is_end(token_ids)

    @property
    def longest_stop(self) -> int:
        """How many tokens a stop text may have, of which each is at least a byte, and a character at most four."""
        return 4 * max(map(len, self.stop), default=0) + 4

    def up_to_end(self, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        """Ids up to the first end, that one included, and whether there is one; also where ends are ignored."""
        generated = list(self.up_to_eos(token_ids))
        stop = self._tokens_up_to_stop(generated) if self.stop else None
        if stop is not None:
            return generated[:stop], True
        return generated, bool(generated) and self._is_end(generated)

    def generated(self, token_ids: Sequence[int]) -> list[int]:
        """What of a row of a batch was generated for it: up to the first end, or everything where ends are ignored."""
        return list(token_ids) if self.are_ignored else self.up_to_end(token_ids)[0]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text up to the first end, without white space around it; thinking is in it."""
        return self.raw_text(token_ids).strip()

    def answer(self, token_ids: Sequence[int]) -> str:
        """The part of the text that is scored: without thinking."""
        return answer_in(self.text(token_ids), self.is_thinking_open)

    def thinking_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of tokens up to the end of thinking, its closing tag included; 0 without thinking."""
        text = self.raw_text(token_ids)
        spans = thinking_spans(text, self.is_thinking_open)
        if not spans:
            return 0
        # Channels end with the answer's text; what comes after it is not before it.
        end = max((each for begin, each in spans if each < len(text)), default=len(text))
        return self._tokens_up_to(end, token_ids, self.raw_text)

    def thinks_after(self, token_ids: Sequence[int], tokens: int) -> bool:
        """Whether a thought went on after so many tokens of an answer, and another token came."""
        return len(token_ids) > tokens and is_in_thinking(self.raw_text(token_ids[:tokens]), self.is_thinking_open)

    def forced_tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """What has to follow the first tokens of an answer, as many as the limit of thinking is."""
        if self.thinking is None or self.text_of is None:
            return ()
        if is_in_thinking(self.text_of(token_ids), self.is_thinking_open):
            return self.thinking.closing
        return () if token_ids else self.thinking.empty

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """The text up to the first end as it is; thinking is in it."""
        assert self.text_of is not None
        return self.cut(self.text_of(self.up_to_eos(token_ids)))

    def up_to_eos(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Ids up to the first end-of-sequence, that one included."""
        end = next((place for place, token in enumerate(token_ids, 1) if token in self.token_ids), len(token_ids))
        return token_ids[:end]

    def cut(self, text: str) -> str:
        """A text before its first stop text, or the whole."""
        return up_to_stop(text, self.stop, self.is_thinking_open)

    def _is_end(self, token_ids: Sequence[int]) -> bool:
        return token_ids[-1] in self.token_ids or (bool(self.stop) and self._has_stop(token_ids))

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        if not self.has_stop_in(token_ids[-self.longest_stop :]):
            return False
        assert self.text_of is not None
        return before_stop(self.text_of(token_ids), self.stop, self.is_thinking_open) is not None

    def has_stop_in(self, last_ids: Sequence[int]) -> bool:
        """Whether a stop text is in the last tokens of an answer, whether or not it ends that."""
        if not self.stop:
            return False
        assert self.text_of is not None
        text = self.text_of(last_ids)
        return any(each in text for each in self.stop)

    def _tokens_up_to_stop(self, token_ids: Sequence[int]) -> int | None:
        """The least number of tokens that contain a stop text that ends the answer; None where none does.

        Whether one does is asked of the text up to it, since thinking may be told as such only by what follows. Of the
        stop texts between two marks of thinking the first stands for all, so that a long thought costs no more.
        """
        assert self.text_of is not None
        text = self.text_of(token_ids)
        places = sorted(places_of_stops(text, self.stop), key=lambda place: place[1])
        thinking_until = 0
        for _, end in places:
            if end <= thinking_until:
                continue
            number = self._tokens_up_to(end, token_ids, self.text_of)
            # Tokens that are parts of a character may show as one more character, or as one less.
            for near in range(max(number - _PARTS, 1), min(number + _PARTS, len(token_ids)) + 1):
                before = self.text_of(token_ids[:near])
                if before_stop(before, self.stop, self.is_thinking_open) is not None:
                    return near
            spans = thinking_spans(before, self.is_thinking_open)
            if spans and spans[-1][1] == len(before):
                thinking_until = next_mark(text, end)
        return None

    @staticmethod
    def _tokens_up_to(length: int, token_ids: Sequence[int], text_of: TextOf) -> int:
        """The least number of tokens, 1 or more, whose text has so many characters."""
        return 1 + bisect_left(range(1, len(token_ids)), length, key=lambda number: len(text_of(token_ids[:number])))


NO_ENDS = AnswerEnds()


class HasEnds:
    """A model with `ends`, whose end-of-sequence tokens may be replaced by themselves."""

    ends: AnswerEnds

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.ends.token_ids

    @eos_token_ids.setter
    def eos_token_ids(self, token_ids: frozenset[int]) -> None:
        self.ends = replace(self.ends, token_ids=frozenset(token_ids))


class StopTexts(StoppingCriteria):
    """Ends each row of `generate()` at its first stop text."""

    def __init__(self, ends: Sequence[AnswerEnds], prompt_tokens: int) -> None:
        self._ends, self._prompt_tokens = ends, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        answers = input_ids[:, self._prompt_tokens :]
        # Of an answer of n tokens, n times its last tokens are read and not n times the whole.
        tails = answers[:, -max(ends.longest_stop for ends in self._ends) :].tolist()
        reached = [
            ends.are_reached(answers[row].tolist() if ends.has_stop_in(tail) else tail)
            for row, (ends, tail) in enumerate(zip(self._ends, tails, strict=True))
        ]
        return torch.tensor(reached, device=input_ids.device)


def stopping_criteria(ends: Sequence[AnswerEnds], prompt_tokens: int) -> list[StoppingCriteria]:
    """What `generate()` has to look at beside end-of-sequence tokens: nothing without stop texts.

    Args:
        ends: of each row.
    """
    return [StopTexts(ends, prompt_tokens)] if any(row.stop and not row.are_ignored for row in ends) else []


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that are left out of a text; a tokenizer that is not of transformers may not say."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = (token for token, content in added.items() if content.special)
    return frozenset(getattr(tokenizer, "all_special_ids", ())) | frozenset(special)


@dataclass(frozen=True)
class TextReader:
    """Text of ids by a tokenizer; can be sent to another process with it."""

    tokenizer: Any
    left_out: frozenset[int]  #: special tokens that no text shows
    marks: frozenset[int]  #: special tokens that tell thinking from the answer

    def __call__(self, token_ids: Sequence[int]) -> str:
        has_marks = not self.marks.isdisjoint(token_ids)
        shown = [token for token in token_ids if token not in self.left_out] if has_marks else list(token_ids)
        text: str = self.tokenizer.decode(shown, skip_special_tokens=not has_marks)
        return text


def text_reader(tokenizer: Any) -> TextReader:
    """Text of ids, without special tokens, but with those by which thinking is told from the answer."""
    vocabulary: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    special = special_token_ids(tokenizer)
    marks = [*marks_in(vocabulary), *(CHANNEL_MARKS if CHANNEL in vocabulary else ())]
    kept = frozenset(vocabulary[mark] for mark in marks if vocabulary.get(mark) in special)
    return TextReader(tokenizer, special - kept, kept)


@dataclass(frozen=True)
class EosSources:
    """End-of-sequence tokens by where a checkpoint names them."""

    by_source: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Their union, each once, in the order of the sources."""
        return tuple(dict.fromkeys(token for ids in self.by_source.values() for token in ids))

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """The union as a generation config has it."""
        ids = list(self.token_ids)
        return ids[0] if len(ids) == 1 else ids or None

    def content(self) -> dict[str, list[int]]:
        """For the record; sources without any are left out."""
        return {name: list(ids) for name, ids in self.by_source.items() if ids}


def eos_sources(
    generation: Any, config: Any, tokenizer: Any, template: str | None, stop_ids: Sequence[int] = ()
) -> EosSources:
    """The end-of-sequence tokens that generation config, model config, tokenizer and chat template name.

    Of a config only special tokens of the tokenizer count: its class has a default of its own, which may be any token.

    Args:
        generation: the checkpoint's generation config; None without one.
        tokenizer: None where there is none to ask.
        template: of the chat; None for a model without one.
        stop_ids: of stop strings in the generation config that are special tokens.
    """
    own = _ids(None if generation is None else generation.eos_token_id)
    text_config = config.get_text_config(decoder=True)
    of_config = (*_ids(getattr(config, "eos_token_id", None)), *_ids(getattr(text_config, "eos_token_id", None)))
    special = frozenset[int]() if tokenizer is None else special_token_ids(tokenizer)
    return EosSources(
        {
            "generation_config": tuple(dict.fromkeys([*own, *stop_ids])),
            "config": tuple(dict.fromkeys(token for token in of_config if token in special)),
            "tokenizer": () if tokenizer is None else _ids(tokenizer.eos_token_id),
            "chat_template": () if tokenizer is None or template is None else turn_end(tokenizer, template),
        }
    )


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    return tuple(token for token in ids if token >= 0)


_ANSWER = "answer of the probe"


def turn_end(tokenizer: Any, template: str) -> tuple[int, ...]:
    """The special token that a chat template puts behind an assistant's answer; () where it puts none."""
    for takes_parts in (False, True):
        try:
            text = tokenizer.apply_chat_template(
                [
                    {"role": role, "content": [{"type": "text", "text": content}] if takes_parts else content}
                    for role, content in (("user", "question of the probe"), ("assistant", _ANSWER))
                ],
                chat_template=template,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):  # a template for the other form
            continue
        if text.count(_ANSWER) == 1:
            return _first_special(text.partition(_ANSWER)[2].lstrip(), tokenizer)
    return ()


def _first_special(text: str, tokenizer: Any) -> tuple[int, ...]:
    vocabulary, special = tokenizer.get_added_vocab(), special_token_ids(tokenizer)
    # In GPT-OSS it is also between the channels of one answer.
    within = {"<|end|>"} if CHANNEL in vocabulary else set()
    tokens = [token for token, index in vocabulary.items() if index in special and token not in within]
    found = re.match("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)", text)
    return () if found is None else (vocabulary[found.group()],)


def without_appended_eos(token_ids: Sequence[int], text: str, tokenizer: Any) -> list[int]:
    """Ids of a prompt without the end-of-sequence that the tokenizer itself adds behind the text."""
    ids, end = list(token_ids), tokenizer.eos_token_id
    if end is not None and ids[-1:] == [end] and not text.rstrip().endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def with_stops(
    ends: AnswerEnds, eos: EosSources, stop: Sequence[str], ignore_eos: bool, tokenizer: Any
) -> tuple[AnswerEnds, EosSources]:
    """The ends of a model and their sources, with stop texts, of which special tokens end an answer as tokens."""
    texts, ids = split_stops(stop, tokenizer)
    more = EosSources({**eos.by_source, "stop": ids})
    return replace(ends, token_ids=ends.token_ids | set(ids), stop=texts, are_ignored=ignore_eos), more


def split_stops(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop texts, and the ids of those that are special tokens, which no text shows."""
    if not stop:
        return (), ()
    vocabulary, special = tokenizer.get_added_vocab(), special_token_ids(tokenizer)
    ids = tuple(vocabulary[text] for text in stop if vocabulary.get(text) in special)
    return tuple(text for text in stop if vocabulary.get(text) not in special), ids
