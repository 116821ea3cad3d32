"""One event of a streamed answer in OpenAI's protocol, read strictly: what is not known is never a finished answer.

https://platform.openai.com/docs/api-reference/chat-streaming says what a chunk has; parts are those of Mistral's form.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.primitives.texts import shown

#: how an answer ends: by itself, or at the limit of tokens
FinishReason = Literal["stop", "length"]
FINISHED: tuple[FinishReason, ...] = get_args(FinishReason)
# What other ends of the protocol mean; an end that is not here, either, is named as it came.
_FAILED = {
    "error": "with an error",
    "content_filter": "because its content filter took it",
    "tool_calls": "with the call of a tool",
    "function_call": "with the call of a function",
}


# No context is longer.
_MOST_TOKENS = 10**9
# A provider's own fields that may say that an answer failed, and what they say of one that did not.
_OF_A_FAILURE = re.compile(
    r"(?:^|_)(?:error|fail\w*|status\w*|reason|filter\w*|block\w*|refus\w*|safety\w*|resp)(?:_|$)", re.IGNORECASE
)
_FINE = frozenset(
    "stop length end_turn max_tokens max_output_tokens eos eos_token end_of_text stop_sequence completed complete "
    "in_progress success succeeded ok done finished normal safe none 0 200".split()
)


class _Read(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Read):
    """Text of the answer."""

    type: Literal["text", "output_text"]
    text: str


class ThinkingPart(_Read):
    """Thinking, as one text or as parts."""

    type: Literal["thinking", "reasoning"]
    thinking: str | list[TextPart] | None = None
    text: str | None = None

    @property
    def thought(self) -> str:
        """Its whole text."""
        parts = self.thinking if isinstance(self.thinking, list) else []
        return "".join(each.text for each in parts) or (self.text or "") + _text(self.thinking)


class RefusalPart(_Read):
    """Why the model does not answer."""

    type: Literal["refusal"]
    refusal: str


class Delta(_Read):
    """What a chunk adds to an answer."""

    role: str | None = None
    content: str | list[Annotated[TextPart | ThinkingPart | RefusalPart, Field(discriminator="type")]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def said(self) -> str:
        """Text of the answer."""
        if isinstance(self.content, list):
            return "".join(each.text for each in self.content if isinstance(each, TextPart))
        return self.content or ""

    @property
    def thought(self) -> str:
        """Text of thinking that came apart from the answer."""
        own = ""
        if isinstance(self.content, list):
            own = "".join(each.thought for each in self.content if isinstance(each, ThinkingPart))
        return own or self.reasoning_content or self.reasoning or ""

    @property
    def refused(self) -> str:
        """Text of a refusal."""
        if isinstance(self.content, list):
            return "".join(each.refusal for each in self.content if isinstance(each, RefusalPart)) or self.refusal or ""
        return self.refusal or ""


class Choice(_Read):
    """One of the answers that a request asked for, of which it asks for one."""

    model_config = ConfigDict(strict=True, extra="allow")

    index: int | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    error: Any = None
    message: Any = None  #: a whole answer in place of a piece, of servers that do not stream
    text: str | None = None  #: the same of the older protocol


class Chunk(_Read):
    """One event of a stream; `usage` is read by `count_in`, since what cannot be read of it is left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    object: str | None = None
    choices: list[Choice] | None = None
    usage: Any = None
    error: Any = None

    @property
    def first(self) -> Choice | None:
        """The choice of index 0, which is the answer; None in an event of another one, or of none."""
        for each in self.choices or ():
            if not each.index:
                return each
        return None


_read_json = TypeAdapter(Chunk).validator.validate_json


def read_chunk(name: bytes, data: bytes, where: str) -> Chunk:
    """The chunk of an event.

    Args:
        name: of the event, empty for none.
        where: the server, as errors name it.

    Raises:
        SampleError: it is an error, or not as the protocol says.
    """
    if name == b"error":
        raise SampleError(f"{where} broke off its answer: {reason_in(data) or 'an error without a reason'}")
    try:
        chunk: Chunk = _read_json(data)
    except ValidationError as error:
        last = error.errors(include_url=False, include_input=False)[-1]
        place = ".".join(each for each in map(str, last["loc"]) if "[" not in each)
        fault = f"{place}: {last['msg']}" if place else last["msg"]
        raise SampleError(f"{where} sent a piece that cannot be read ({shown(fault)}): {first_bytes(data)}") from None
    choice = chunk.first
    failure = chunk.error or (choice.error if choice is not None else None)
    if failure or chunk.object == "error":
        raise SampleError(f"{where} broke off its answer: {reason_in(data) or 'an error without a reason'}")
    if own := next(own_failures(chunk.model_extra or {}, choice.model_extra or {} if choice is not None else {}), None):
        raise SampleError(f"{where} says that its answer failed: {shown(own)}")
    if chunk.choices is None and chunk.usage is None and (said := reason_in(data)) is not None:
        raise SampleError(f"{where} broke off its answer: {said}")
    if choice is not None and (choice.message is not None or choice.text is not None):
        raise SampleError(f"{where} sent a whole answer in one event and no stream of pieces, so no times are known")
    return chunk


def own_failures(*fields: Mapping[str, Any]) -> Iterator[str]:
    """What fields of a provider's own say of a failure, `name: value`, those inside others too."""
    for name, value in (item for each in fields for item in each.items()):
        if isinstance(value, Mapping):
            yield from own_failures(value)
        elif isinstance(value, list):
            yield from own_failures(*(each for each in value if isinstance(each, Mapping)))
        # A stop token or text, of vLLM, is no failure.
        elif name == "stop_reason" and not _OF_A_FAILURE.search(str(value)):
            continue
        elif value and _OF_A_FAILURE.search(name) and str(value).lower() not in _FINE:
            yield f"{name}: {value}"


def finish_reason_of(choice: Choice, where: str) -> FinishReason | None:
    """How the answer ended; None while it goes on. Raises SampleError for an end that is none of an answer."""
    delta, reason = choice.delta, choice.finish_reason
    if delta is not None:
        if delta.role not in (None, "", "assistant"):
            raise SampleError(f"{where} sent text of the role {shown(delta.role)}, which is no answer")
        if refused := delta.refused:
            raise SampleError(f"{where} refused to answer: {shown(refused)}")
        if delta.tool_calls or delta.function_call:
            reason = "tool_calls"
    if not reason:
        return None
    for known in FINISHED:
        if reason == known:
            return known
    said = _FAILED.get(reason, f"for a reason that is not known as an end of an answer ({shown(reason)})")
    raise SampleError(f"{where} ended its answer {said}")


def count_in(usage: Any, *names: str) -> int | None:
    """The number at this place of `usage`; None where there is none that a count can be."""
    for name in names:
        usage = usage.get(name) if isinstance(usage, Mapping) else None
    return usage if type(usage) is int and 0 <= usage <= _MOST_TOKENS else None


def reason_in(body: bytes) -> str | None:
    """The first line of what an error says, in OpenAI's, FastAPI's or a gateway's form or as text; None without one."""
    try:
        content = from_json(body)
    except ValueError:
        content = body.decode("utf-8", "replace")
    texts = _texts_in(content)
    return next((shown(line.strip()) for text in texts for line in text.splitlines() if line.strip()), None)


def _texts_in(content: Any) -> Iterator[str]:
    """What an error's body may say, the likeliest first."""
    if isinstance(content, Mapping):
        own = {name: content.get(name) for name in ("error", "message", "detail", "code")}
        found = [each for each in own.values() if each] or [
            each.get("error") for each in _listed(content.get("choices")) if isinstance(each, Mapping)
        ]
        for each in found:
            yield from _texts_in(each)
    elif content is not None:
        yield str(content)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def first_bytes(data: bytes) -> str:
    """The beginning of what a server sent, for a message."""
    text = " ".join(data[:100].decode("utf-8", "replace").split())
    return f"{shown(text)!r}{' ...' if len(data) > 100 else ''}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
