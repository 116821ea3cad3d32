"""Cells of a table that contain pictures: paths, bytes, base64, data URIs, and lists of these."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import parse_json
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.datasets.questions import literal_list, picture_file

# What files of the formats that are read begin with.
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_FILE_NAME = re.compile(r"\S.*\.(?:jpe?g|png|webp|gif|bmp|tiff?)", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# The smallest pictures there are have 48 characters.
_LEAST_BASE64 = 40
_BASE64 = re.compile(r"[A-Za-z0-9+/]+")


def looks_like_picture(value: Any) -> bool:
    """Whether a cell contains a picture, whatever its column is called; a list, whether its first one does."""
    if isinstance(value, list | tuple):
        return bool(value) and looks_like_picture(value[0])
    if isinstance(value, Mapping):
        return bool({"bytes", "path"} & value.keys()) and (
            isinstance(value.get("bytes"), bytes) or looks_like_picture(value.get("path"))
        )
    if isinstance(value, bytes):
        return value.startswith(_MAGIC)
    if not isinstance(value, str):
        return False
    text = value.strip()
    if text.startswith("["):
        text = text.lstrip("[ \"'").rstrip("] \"'")
    return text[:11].lower() == "data:image/" or bool(_FILE_NAME.fullmatch(text)) or _is_base64_picture(text)


def pictures_in(cell: Any) -> tuple[Mapping[str, Any], ...]:
    """The pictures of a cell in the form of the hub: a path, bytes, or both.

    Raises:
        SampleError: it is something else, an address of the web, or base64 that cannot be decoded.
    """
    if isinstance(cell, str) and cell.strip().startswith("[") and cell.strip().endswith("]"):
        cell = _listed(cell.strip())
    if isinstance(cell, list | tuple):
        found = [pictures_in(each) for each in cell if not isinstance(each, list | tuple)]
        if len(found) < len(cell) or not all(found):
            raise SampleError(f"its image is {shown(repr(cell))}, a list with something else than pictures in it")
        return tuple(each for (each,) in found)
    picture = _picture(cell)
    return () if picture is None else (picture,)


def _listed(cell: str) -> list[Any]:
    try:
        found = parse_json(cell, "image")
    except ConfigurationError:
        return literal_list(cell, "image")
    assert isinstance(found, list)
    return found


def _picture(cell: Any) -> Mapping[str, Any] | None:
    if cell is None or cell == "":
        return None
    if isinstance(cell, str):
        return _of_text(cell)
    if isinstance(cell, bytes):
        return {"bytes": cell, "path": None}
    if not isinstance(cell, Mapping):
        raise SampleError(f"its image is {shown(repr(cell))}, neither a path nor bytes")
    content, path = cell.get("bytes"), cell.get("path")
    if content is None and isinstance(path, str):
        return _of_text(path)
    if isinstance(content, str):
        return {"bytes": _decoded(content), "path": path}
    return cell if content is not None or path is not None else None


def _of_text(cell: str) -> Mapping[str, Any]:
    if cell[:5].lower() == "data:":
        kind, comma, content = cell.partition(",")
        if not comma or not kind.lower().rstrip().endswith(";base64"):
            raise SampleError(
                f"its image is the data URI {shown(cell[:60])}, which is not in base64; write it in base64"
            )
        return {"bytes": _decoded(content), "path": None}
    if scheme := _SCHEME.match(cell):
        if scheme[1].lower() == "file":
            return picture_file(unquote(urlsplit(cell).path))
        raise SampleError(
            f"its image is the address {shown(cell)}, and nothing is downloaded while measuring: download the pictures "
            "and give their paths"
        )
    return {"bytes": _decoded(cell), "path": None} if _is_base64_picture(cell) else picture_file(cell)


def _is_base64_picture(text: str) -> bool:
    """By its first characters, which say what format the file has."""
    head = "".join(text[:_LEAST_BASE64].split())[:16]
    if len(text) < _LEAST_BASE64 or not _BASE64.fullmatch(head) or len(head) < 16:
        return False
    return base64.b64decode(head).startswith(_MAGIC)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError(f"its image is base64 that cannot be decoded ({error}); encode the file again") from error
