"""One error of every class that Python, torch and the libraries below it have, and where a run may meet it."""

import json
import struct
import zlib
from collections.abc import Iterator

import jinja2
import torch
from PIL import Image, UnidentifiedImageError

# Their constructors need more than a message.
_OF_UNICODE = {
    "UnicodeDecodeError": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
    "UnicodeEncodeError": UnicodeEncodeError("utf-8", "\udcff", 0, 1, "odd"),
    "UnicodeTranslateError": UnicodeTranslateError("odd", 0, 1, "odd"),
}
_OF_LIBRARIES = (
    jinja2.TemplateError, Image.DecompressionBombError, UnidentifiedImageError, struct.error, zlib.error,
    torch.linalg.LinAlgError,
)  # fmt: skip


def _classes_below(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for each in base.__subclasses__():
        if each.__module__ == "builtins":
            yield from _classes_below(each)


def every_error() -> list[Exception]:
    """An error of each class, the message with a line break and an escape code in it."""
    builtin = dict.fromkeys(_classes_below(Exception))
    groups = [ExceptionGroup("odd\nrow", [ValueError("inside")]), json.JSONDecodeError("odd\nrow", "{", 0)]
    others = [each for each in builtin if each is not ExceptionGroup and each.__name__ not in _OF_UNICODE]
    return [*(each("odd \x1b[31m\nrow") for each in (*others, *_OF_LIBRARIES)), *_OF_UNICODE.values(), *groups]
