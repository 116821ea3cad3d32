"""Checks of texts from outside, their short form in one-line messages, suggestions for misspelt names, digests."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote, urlsplit

# In a cell, of what was not measured or does not apply.
ABSENT = "–"

_MOST_SHOWN = 200


_HIDDEN = "***"
# Shorter ones, and words, which a file may have for other reasons, are hidden where they stand alone.
_LEAST_HIDDEN, _LEAST_HIDDEN_ANYWHERE = 4, 8
# What finds each secret that was given, by the secret.
_SECRETS: dict[str, re.Pattern[str]] = {}


def hide(secret: str | None) -> None:
    """From now on no text that leaves has this secret in it, however it is written; None and short ones are none."""
    if secret is None or len(secret) < _LEAST_HIDDEN:
        return
    forms = {secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], html.escape(secret)}
    forms.add(base64.b64encode(secret.encode()).decode().rstrip("="))
    found = "|".join(re.escape(each) for each in sorted(forms, key=len, reverse=True))
    is_word = len(secret) < _LEAST_HIDDEN_ANYWHERE or re.fullmatch("[a-z_]+", secret) is not None
    _SECRETS[secret] = re.compile(rf"(?<!\w)(?:{found})(?!\w|\":)" if is_word else found)


def without_hidden(text: str) -> str:
    """A text without the secrets that were given, as it may leave: to a terminal, a file or a page."""
    for each in _SECRETS.values():
        text = each.sub(_HIDDEN, text)
    return text


def is_text(value: Any) -> bool:
    """Whether it is a string that can be written as UTF-8; half a surrogate pair cannot; no tokenizer takes it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A name or value as part of a one-line message: without line breaks and the like, and short."""
    text = without_hidden(value if isinstance(value, str) else repr(value))
    if len(text) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        text = f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def has_host(url: str) -> bool:
    """Whether an address can be read, has a host, and has no port that is none."""
    try:
        return urlsplit(url).hostname is not None and urlsplit(url).port != 0
    except ValueError:
        return False


def without_secrets(address: str) -> str:
    """The address of a server as records and messages show it: without user, password and query.

    Where it cannot be read, all before its last @ is left out, too. What stands before its scheme stays.
    """
    head, separator, rest = address.partition("://") if "://" in address else ("", "", address)
    user = r"\A[^/?#]*@" if has_host(f"http://{rest}") else r"(?s)\A.*@"
    return without_hidden(f"{head}{separator}{re.split('[?#]', re.sub(user, '', rest))[0]}")


def counted(number: int, noun: str) -> str:
    """A number of things: "1 setting", "0 settings", "3 processes"."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def all_of(number: int, noun: str) -> str:
    """All of several things, or the only one: "all 3 settings", "the only setting"."""
    return f"the only {noun}" if number == 1 else f"all {counted(number, noun)}"


def first_of(names: Sequence[object], most: int) -> str:
    """At most so many names, and how many more there are: "a, b and 3 more"."""
    return ", ".join(map(str, names[:most])) + and_more(len(names) - most)


def and_more(num_more: int) -> str:
    """What follows the first of several things, " and 3 more"; empty where there are no more."""
    return f" and {num_more} more" if num_more > 0 else ""


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# All but new line, tab, carriage return and the escape by which progress bars go up a line.
_CONTROL_OF_A_STREAM = re.compile(r"(?!\x1b\[A)[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def printable(text: str, *, is_stream: bool = False) -> str:
    """A line for a terminal without secrets, in which control characters, which a name may contain, are escapes.

    Args:
        is_stream: whether the text is of several lines and progress bars, whose own control characters stay.
    """
    control = _CONTROL_OF_A_STREAM if is_stream else _CONTROL
    return control.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), without_hidden(text))


def _compared(name: str) -> str:
    # The dashes of a flag, and the ending of one that takes several values, would make all flags alike.
    return name.lstrip("-").removesuffix("_list")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """What an error about an unknown name adds, " (did you mean NAME?)"; empty where no known name is near."""
    names = {_compared(each): each for each in known}
    nearest = get_close_matches(_compared(given), names, n=1, cutoff=0.65)
    return f" (did you mean {names[nearest[0]]}?)" if nearest else ""


def short_digest(content: str | bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of some text or bytes; equal for equal content, on any machine."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]
