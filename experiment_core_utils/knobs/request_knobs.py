"""Knobs that the request to a server carries: their base, and the fields of `--request_knob NAME=V1,V2`."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from experiment_core_utils.knobs.interface import CannotBeSeen, KnobRequest, Level, RequestedValues, Turned
from experiment_core_utils.knobs.listed_knob import ListedKnob
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.flag_fields import Part
from experiment_core_utils.primitives.texts import shown

_NO_SERVER = "only a request to a server carries it; give --endpoint, or drop it"
_COLUMN, _LABEL = "request.", "req-"
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z_][A-Za-z0-9_-]*)*")
_LONGEST_LABEL = 100  # bytes, of a file name that has several
#: fields that cannot be set, and what to do
_OWNED = {
    **dict.fromkeys(("messages", "model", "stream", "stream_options", "n"), "the run sets it in every request"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "the run sets it; give --answer_limit_list"),
    "stop": "the run sets it; give --stop",
    "ignore_eos": "the run sets it; give --ignore_eos",
    "reasoning_effort": "the run sets it; give --reasoning_effort_list",
    "extra_body": "it is of OpenAI's Python client; give the field inside it",
}


class ServerKnob(ListedKnob):
    """A knob of a request. At rest the request does not name it, and the server does what it does by itself.

    A class of it has `request_fields`.
    """

    page = "how_to/profile_a_server.md"

    def no_knob_reason(self, request: KnobRequest) -> str | None:
        return None if request.limits.variants else _NO_SERVER

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The request has it, and nothing else decides."""
        return None


class RequestField(ServerKnob):
    """A field that a server may or may not follow; whether it does shows by what it counts and answers."""

    path: ClassVar[tuple[str, ...]]  #: of the field in the request, the outermost object's key first
    at_rest = "own"
    neutral: Level = at_rest

    def request_fields(self, value: Level) -> Mapping[str, Any]:
        if value == self.at_rest:
            return {}
        content: Any = value
        if isinstance(value, str):
            with suppress(ValueError):
                content = _read_json(value)
        for name in reversed(self.path):
            content = {name: content}
        return dict(content)

    def prove(self, proof: Any, setting: Turned, model: Any) -> CannotBeSeen | None:
        """The answers with it and without it are compared, as `EndpointModel.prove` has asked for them."""
        seen = None if setting.value(self.name) == self.at_rest else proof.counted.get(self.name)
        return None if seen is None or seen["differs"] else CannotBeSeen(seen["reason"])


class NamedField(RequestField):
    """A field of `--request_knob`; `field_knob` makes a class of each."""

    meaning = "field of the request to a server"
    flags, flag, is_sorted_in_plans = type("RequestFieldFlags", (Part,), {}), "request_knob", False

    def requested(self, request: KnobRequest) -> RequestedValues[Level]:
        """Raises ConfigurationError where values are values for a model that is not behind a server."""
        values = requested_fields(request.flags.request_knob or ()).get(self.name, ())
        if values and (reason := self.no_knob_reason(request)) is not None:
            raise ConfigurationError(f"--request_knob {'.'.join(self.path)} cannot be set in {request.model}: {reason}")
        return RequestedValues(values or (self.at_rest,), is_given=bool(values))

    def order(self, value: Level) -> tuple[float, ...]:
        """Numbers ascend, texts follow, the server's own comes last."""
        if value == self.at_rest:
            return (math.inf,)
        return (1.0, *map(float, value.encode())) if isinstance(value, str) else (0.0, float(value))

    def label(self, value: Level) -> str:
        return f"{self.prefix}{_escaped(_written(value))}"

    def read_level(self, text: str) -> Level | None:
        plain = _unescaped(text)
        return None if plain is None else _level_of(plain)

    def of_level(self, level: Level) -> Level:
        return level


def field_knob(name: str) -> NamedField | None:
    """The knob of a column such as `request.top_k`; None for another name."""
    path = name.removeprefix(_COLUMN)
    if path == name or not _PATH.fullmatch(path):
        return None
    attributes = {"name": name, "title": name, "plural": f"values of {name}", "path": tuple(path.split("."))}
    knob_class: type[NamedField] = type(NamedField.__name__, (NamedField,), {**attributes, "prefix": _prefix(path)})
    return knob_class()


def field_in_label(label: str) -> str | None:
    """The column that a part of a key, such as `req-top-k--5`, has a value of; None for a part of another knob."""
    path = _unescaped(label.removeprefix(_LABEL).partition("--")[0]) if label.startswith(_LABEL) else None
    return None if path is None else f"{_COLUMN}{path}"


def requested_fields(flags: Iterable[str]) -> dict[str, tuple[Level, ...]]:
    """The values of flag field by the name of its knob.

    Args:
        flags: flag NAME=V1,V2; a value is JSON where it can be read as JSON, else a text.

    Raises:
        ConfigurationError: another form, a field that is set elsewhere, one that is inside another, or one value twice.
    """
    fields: dict[str, tuple[Level, ...]] = {}
    for flag in flags:
        path, sign, texts = flag.partition("=")
        if not sign or not _PATH.fullmatch(path):
            raise ConfigurationError(
                f"--request_knob {shown(flag)} is not possible; give NAME=V1,V2, such as top_k=20,40 or "
                "chat_template_kwargs.enable_thinking=true,false"
            )
        owner = _OWNED.get(path.partition(".")[0])
        if owner is not None:
            raise ConfigurationError(f"--request_knob {path} cannot be set: {owner}, or drop it")
        column = f"{_COLUMN}{path}"
        for other in fields:
            if f"{other}.".startswith(f"{column}.") or f"{column}.".startswith(f"{other}."):
                near = other.removeprefix(_COLUMN)
                raise ConfigurationError(
                    f"--request_knob {path} and {near} are one field, or one is in the other; drop one"
                )
        values = tuple(_level_of(text) for text in _divided(texts))
        labels = [f"{_prefix(path)}{_escaped(_written(value))}" for value in values]
        if len(set(values)) < len(values):
            raise ConfigurationError(f"--request_knob {shown(flag)} has one value twice; drop one")
        if longest := next((label for label in labels if len(label) > _LONGEST_LABEL), None):
            raise ConfigurationError(
                f"--request_knob {path} is too long for the name of a file ({len(longest)} letters, at most "
                f"{_LONGEST_LABEL}); give shorter values"
            )
        fields[column] = values
    return fields


def merged(*fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of requests together; objects of the same key are merged, of other values the last one counts."""
    joined: dict[str, Any] = {}
    for part in fields:
        for name, value in part.items():
            is_both = isinstance(value, Mapping) and isinstance(joined.get(name), Mapping)
            joined[name] = merged(joined[name], value) if is_both else value
    return joined


def _divided(texts: str) -> Iterable[str]:
    """Values between commas; an object, a list or a text of JSON ends where it ends."""
    place, length = 0, len(texts)
    while place <= length:
        end = texts.find(",", place) if "," in texts[place:] else length
        if texts.startswith(("{", "[", '"'), place):
            with suppress(ValueError):
                after = json.JSONDecoder().raw_decode(texts, place)[1]
                end = after if texts[after : after + 1] in ("", ",") else end
        yield texts[place:end]
        place = end + 1


def _read_json(text: str) -> Any:
    """The value of JSON; raises ValueError for another text, also for what JSON has no number for."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    value = json.loads(text, parse_constant=refuse)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"--request_knob: {text} is no number that a float can be; give another one")
    return value


def _level_of(text: str) -> Level:
    """The value of a text: numbers as such, other JSON as it is written shortest, what is no JSON as it is."""
    try:
        value = _read_json(text)
    except ValueError:
        return text
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return value if isinstance(value, str) and _level_of_plain(value) else written


def _level_of_plain(text: str) -> bool:
    """Whether a text stands for itself without quotes."""
    try:
        _read_json(text)
    except ValueError:
        return text != RequestField.at_rest
    return False


def _written(level: Level) -> str:
    return level if isinstance(level, str) else json.dumps(level)


def _prefix(path: str) -> str:
    return f"{_LABEL}{_escaped(path)}--"


def _escaped(text: str) -> str:
    """A text of letters, digits, `.` and `-` alone: `_` before a letter becomes `-`, another byte `-` and three digits.

    Two such texts are different where the texts are, and have no `--`.
    """

    def escape(letter: re.Match[str]) -> str:
        return "-" if letter[1] else "".join(f"-{byte:03d}" for byte in letter[0].encode())

    # A file's ending is letter by its beginning.
    return re.sub(r"(_(?=[A-Za-z]))|\.(?=rank|json)|[^A-Za-z0-9.]", escape, text)


def _unescaped(text: str) -> str | None:
    """The inverse of `_escaped`; None for a text that it does not make."""
    try:
        parts = re.sub(rb"-(?:(\d{3}))?", lambda byte: bytes([int(byte[1])]) if byte[1] else b"_", text.encode())
        plain = parts.decode()
    except ValueError:
        return None
    return plain if _escaped(plain) == text else None
