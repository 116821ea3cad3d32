"""What of a generated text is the answer: without what the model thinks before it, up to the first stop text.

Thinking is what models write between marks such as `<think>` and `</think>` (Qwen3, DeepSeek-R1), `[THINK]`
(Magistral), `<seed:think>` (Seed-OSS), `◁think▷` (Kimi-VL), `<|START_THINKING|>` (Command A), `<|inner_prefix|>`
(Apertus), or in other channels than `final` (GPT-OSS's response format "harmony"). A mark is known by its form: a name
of thinking in brackets, which closes where it has a slash or a word such as "end" in it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

_NAME = r"(?:think|thinking|thought|thoughts|reason|reasoning|inner|monologue|reflection|scratchpad|cot|working_out)"
# The last two are Gemma's.
_TAG = re.compile(
    rf"<[|｜]?/?(?:[^\W_]{{1,20}}[:_▁]){{0,3}}{_NAME}(?:[:_▁][^\W_]{{1,20}}){{0,2}}[|｜]?>"
    rf"|[\[◁]/?{_NAME}[\]▷]|<\|channel>|<channel\|>",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"/|(?:^|[^a-z])(?:end|suffix|stop|close)(?=[^a-z])|<channel\|>", re.IGNORECASE)
# Of GPT-OSS: a header names the channel of the text up to the next of these.
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
CHANNEL_MARKS = (CHANNEL, MESSAGE, "<|start|>", "<|end|>")

_MESSAGE = re.compile(
    r"<\|channel\|>\s*(\w+)(?:(?!<\|message\|>).)*<\|message\|>"
    r"(.*?)(?=<\|(?:start|end|return|call|channel)\|>|\Z)",
    re.S,
)
# The same text where the marks were left out, as results from before have it.
_CHANNELS_LEFT = re.compile(r"analysis.*assistantfinal", re.S)
# An answer between tags, of which the closing one may be missing at the end.
ANSWER_TAGS = r"<answer>(.*?)(?:</answer>|\Z)"
_WRAPPED = re.compile(ANSWER_TAGS, re.S | re.IGNORECASE)

Span = tuple[int, int]


def thinking_spans(text: str, is_open: bool = False) -> list[Span]:
    """Where a text is thinking, tags and headers included, in order: [begin, end) each.

    A closing tag without an opening one ends thinking that began with the text; thinking that is not closed has no end,
    and an opening tag behind other text that is never closed is a word of that text where there is no other.

    Args:
        is_open: whether the prompt ends inside thinking, so that the text begins in it.
    """
    if CHANNEL in text:
        return list(_around_final(text))
    left = _CHANNELS_LEFT.match(text)
    if left is not None:
        return [left.span()]
    spans: list[Span] = []
    begin = 0 if is_open else None
    for tag in _TAG.finditer(text):
        if not _CLOSING.search(tag.group()):
            begin = tag.start() if begin is None else begin
        elif begin is None:
            spans = [(0, tag.end())]
        else:
            spans.append((begin, tag.end()))
            begin = None
    if begin is not None and (is_open or spans or not text[:begin].strip()):
        spans.append((begin, len(text)))
    return spans


def _around_final(text: str) -> Iterator[Span]:
    """All but the contents of the final channel."""
    end = 0
    for message in _MESSAGE.finditer(text):
        if message.group(1) == "final":
            yield end, message.start(2)
            end = message.end(2)
    if end < len(text):
        yield end, len(text)


def answer_in(text: str, is_open: bool = False) -> str:
    """The answer in a generated text, without thinking; "" where thinking has not ended.

    Args:
        is_open: as of `thinking_spans`.
    """
    spans = thinking_spans(text, is_open)
    if not spans:
        return text
    begins, ends = zip(*spans, strict=True)
    parts = (text[end:begin] for end, begin in zip((0, *ends), (*begins, len(text)), strict=True))
    return "".join(parts).strip()


def unwrapped(answer: str) -> str:
    """What is in the last `<answer>` of an answer that has something in it; without any, the answer without the tags.

    Metrics read it, not `answer_in`: lmms-eval's scorers and those of users read such tags themselves.
    """
    contents = [content.strip() for content in _WRAPPED.findall(answer) if content.strip()]
    return contents[-1] if contents else _WRAPPED.sub("", answer)


def scored_text(prediction: str, answer: str | None) -> str:
    """What is scored of a prediction: the answer that was noted beside it, else the one in it."""
    return answer_in(prediction) if answer is None else answer


def is_thinking_opened_by(prompt: str) -> bool:
    """Whether a prompt ends inside thinking, so that its answer begins there."""
    tags = list(_TAG.finditer(prompt.rstrip()))
    return bool(tags) and tags[-1].end() == len(prompt.rstrip()) and not _CLOSING.search(tags[-1].group())


def is_in_thinking(text: str, is_open: bool = False) -> bool:
    """Whether a text that was generated so far ends inside thinking.

    Args:
        is_open: as of `thinking_spans`.
    """
    spans, tags = thinking_spans(text, is_open), list(_TAG.finditer(text))
    is_closed = bool(tags) and tags[-1].end() == len(text) and _CLOSING.search(tags[-1].group()) is not None
    return bool(spans) and spans[-1][1] == len(text) and not is_closed


def thinking_pair(marks: Iterable[str]) -> tuple[str, str] | None:
    """The first mark that begins thinking for which there is one that ends it, and that; None without a pair."""
    closing = {_without_side(mark): mark for mark in reversed(list(marks)) if _CLOSING.search(mark)}
    begun = (mark for mark in marks if not _CLOSING.search(mark) and _without_side(mark) in closing)
    return next(((mark, closing[_without_side(mark)]) for mark in begun), None)


def _without_side(mark: str) -> str:
    """What a mark that begins thinking and the one that ends it have in common: `<|END_THINKING|>` is `thinking`."""
    sides = {"start", "begin", "prefix", "end", "stop", "close", "suffix"}
    return " ".join(word for word in re.findall(r"[^\W_]+", mark.lower()) if word not in sides)


def marks_in_text(text: str) -> list[str]:
    """The marks of thinking in a text, in order."""
    return _TAG.findall(text)


def marks_in(tokens: Iterable[str]) -> list[str]:
    """Those of a tokenizer's tokens that begin or end thinking."""
    return [token for token in tokens if _TAG.fullmatch(token)]


def up_to_stop(text: str, stop: Sequence[str], is_open: bool = False) -> str:
    """The text before the first stop text, or the whole; see `before_stop`."""
    before = before_stop(text, stop, is_open)
    return text if before is None else before


def before_stop(text: str, stop: Sequence[str], is_open: bool = False) -> str | None:
    """The text before the first stop text; None where there is none.

    Inside thinking, and in the white space between thinking and the answer, a stop text ends nothing.

    Args:
        is_open: as of `thinking_spans`.
    """
    found = places_of_stops(text, stop)
    spans = thinking_spans(text, is_open) if found else []
    for begin, end in sorted(found):
        behind = max((span_end for _, span_end in spans if span_end <= begin), default=None)
        is_inside = any(span_begin < end and begin < span_end for span_begin, span_end in spans)
        if not is_inside and (behind is None or text[behind:end].strip()):
            return text[:begin]
    return None


def next_mark(text: str, begin: int) -> int:
    """Where the next tag or channel begins, at `begin` or behind it; the end of the text without one."""
    tag = _TAG.search(text, begin)
    own = [] if tag is None else [tag.start()]
    return min([*own, *(place for mark in CHANNEL_MARKS if (place := text.find(mark, begin)) >= 0), len(text)])


def places_of_stops(text: str, stop: Sequence[str]) -> list[Span]:
    """Where stop texts are in a text, those that overlap too: [begin, end) each."""
    return [place for each in stop for place in _places(text, each)]


def _places(text: str, part: str) -> Iterator[Span]:
    begin = text.find(part)
    while begin >= 0:
        yield begin, begin + len(part)
        begin = text.find(part, begin + 1)
