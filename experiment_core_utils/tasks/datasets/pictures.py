"""Pictures as upright 8-bit RGB, read from a file or from bytes.

A picture that cannot be read is one failed sample, never the end of a run. No other module opens pictures: Pillow tries
every format that it knows, whatever a file is called, and for PostScript it runs Ghostscript.
"""

import hashlib
import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from experiment_core_utils.primitives.errors import LIBRARY_ERRORS, SampleError, first_line
from experiment_core_utils.primitives.texts import shown

T = TypeVar("T")

# By their content, not by their names. All are decoded inside this process.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Above this a small file may claim more memory than a machine has; Pillow's own limit for a warning.
MAX_PIXELS = 89_478_485
_READ_BYTES = 1 << 20

# What Pillow's decoders raise for broken files, by format and by where the damage is.
_BROKEN = (*LIBRARY_ERRORS, SyntaxError, EOFError, MemoryError, struct.error, zlib.error)
_HUGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclass(frozen=True)
class OpenedPicture:
    """A decoded picture, and the digest of what it was decoded from."""

    image: Image.Image  #: RGB
    sha256: str  #: of the encoded picture, in hexadecimal digits


def open_picture(content: bytes | Path, name: str) -> OpenedPicture:
    """The picture as RGB: turned as its EXIF orientation says, 16-bit grey scaled, transparency laid on white.

    Of a file with several frames it is the first.

    Args:
        content: the encoded picture, or the file that contains it.
        name: what an error calls it.

    Raises:
        SampleError: missing, no regular file, truncated, not a picture of one of the `FORMATS`, no or more than
            `MAX_PIXELS` pixels, or grey values whose range is not stated (32-bit and floating-point pixels).
    """
    return _read(content, shown(name), lambda picture, stream: _decoded(picture, stream, shown(name)))


def _read(content: bytes | Path, name: str, read: Callable[[Image.Image, IO[bytes]], T]) -> T:
    """What `read` gives of the picture, of which only the header was read before, and of its encoded bytes."""
    try:
        with _stream(content, name) as stream, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(stream, formats=FORMATS) as picture:
                size = f"{picture.width} x {picture.height} pixels"
                if picture.width * picture.height > MAX_PIXELS:
                    raise SampleError(f"picture {name} is too large: {size}, at most {MAX_PIXELS}")
                if picture.width * picture.height == 0:
                    raise SampleError(f"picture {name} is empty: {size}")
                return read(picture, stream)
    except _HUGE as error:
        raise SampleError(f"picture {name} is too large: {first_line(error)}, at most {MAX_PIXELS}") from error
    except UnidentifiedImageError as error:
        # Pillow's message contains the address of a buffer, different in every run.
        raise SampleError(
            f"picture {name} cannot be read: it is in no known picture format ({', '.join(FORMATS)}); convert it"
        ) from error
    except _BROKEN as error:
        raise SampleError(f"picture {name} cannot be read: {shown(first_line(error))}") from error


def _decoded(picture: Image.Image, stream: IO[bytes], name: str) -> OpenedPicture:
    picture.load()
    decoded = _rgb(ImageOps.exif_transpose(picture), name)
    # It is turned already: a processor that looks again would turn it twice, or fail on a broken header.
    decoded.info.pop("exif", None)
    return OpenedPicture(decoded, _digest_of(stream))


@contextmanager
def _stream(content: bytes | Path, name: str) -> Iterator[IO[bytes]]:
    if isinstance(content, bytes):
        yield io.BytesIO(content)
        return
    # Reading a pipe or a device may never end.
    if not os.path.isfile(content):
        where = shown(str(content))
        if os.path.lexists(content):
            raise SampleError(f"picture {name} cannot be read: {where} is not a regular file")
        raise SampleError(f"picture {name} is missing: there is no file {where}")
    with content.open("rb") as file:
        yield file


def _digest_of(stream: IO[bytes]) -> str:
    """Of the whole stream. Read from the open file: a file that takes its name meanwhile is another."""
    stream.seek(0)
    digest = hashlib.sha256()
    while part := stream.read(_READ_BYTES):
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class PictureFolders:
    """Where the pictures of rows lie; a row has one in the hub's form, ``{"bytes": ..., "path": ...}``, or None."""

    #: a path in a row is relative to one of these, with or without its subfolders: archives differ in whether they keep
    #: those
    roots: Sequence[Path]
    folders: Sequence[Path]  #: the file that a path leads to, all links followed, has to lie in one of these
    exactly: bool = False  #: a path counts only as it is written

    def opened(self, picture: Mapping[str, Any] | None, name: str) -> OpenedPicture:
        """A row's picture, decoded, with its digest.

        Args:
            name: what an error calls it where it has no path.

        Raises:
            SampleError: the row has none, or one that cannot be read.
        """
        return open_picture(*self._named(picture, name))

    def digest(self, picture: Mapping[str, Any] | None, name: str) -> str:
        """The digest that `opened` gives, from the stored picture alone; arguments and errors as there."""
        content, label = self._named(picture, name)
        try:
            with _stream(content, shown(label)) as stream:
                return _digest_of(stream)
        except _BROKEN as error:
            raise SampleError(f"picture {shown(label)} cannot be read: {shown(first_line(error))}") from error

    def check(self, picture: Mapping[str, Any] | None, name: str) -> None:
        """Raises as `opened` where a row's picture is missing or its header cannot be read; decodes nothing."""
        content, label = self._named(picture, name)
        _read(content, shown(label), lambda picture, stream: None)

    def _named(self, picture: Mapping[str, Any] | None, name: str) -> tuple[bytes | Path, str]:
        content = self.stored(picture)
        return content, name if picture is None or isinstance(content, bytes) else picture["path"]

    def stored(self, picture: Mapping[str, Any] | None) -> bytes | Path:
        """The bytes of a row's picture, or the file that has them; raises as `opened`."""
        if picture is None:
            raise SampleError("the row has no picture")
        if not isinstance(picture, Mapping):
            raise SampleError(f"the picture is {type(picture).__name__}, not bytes with a path as on the hub")
        content, path = picture.get("bytes"), picture.get("path")
        if isinstance(content, bytes):
            return content
        if content is not None:
            raise SampleError(f"the picture's bytes are {shown(repr(content))}, not bytes")
        if path is None:
            raise SampleError("the row has a picture without bytes and without a path")
        if not isinstance(path, str):
            raise SampleError(f"the picture's path is {shown(repr(path))}, not a text")
        if "\0" in path:
            raise SampleError(f"the picture's path {shown(path)} contains a NUL, which no file name has; correct it")
        return self.find(path)

    def find(self, path: str) -> Path:
        """The file that a row's path names, which may be missing; raises SampleError for one outside the folders."""
        names = (path,) if self.exactly else (path, Path(path).name)
        candidates = [root / name for root in self.roots for name in names] or [Path(path)]
        # Not Path.is_file: it raises for a name that is too long or a folder that is closed to this user.
        there = [candidate for candidate in candidates if os.path.isfile(candidate)]
        allowed = [os.path.realpath(folder) for folder in self.folders]
        inside = [each for each in there if any(Path(os.path.realpath(each)).is_relative_to(one) for one in allowed)]
        if there and not inside:
            raise SampleError(
                f"picture {shown(path)} is not read: it is outside {shown(str(self.folders[0]))} (an absolute path, "
                "'..' or a link); copy it there"
            )
        return inside[0] if inside else candidates[0]


def _rgb(picture: Image.Image, name: str) -> Image.Image:
    if picture.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255, which leaves a white picture.
        values = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):
        raise SampleError(f"picture {name} has pixels of mode {picture.mode}, whose range is not stated: convert it")
    if picture.has_transparency_data:
        coloured = picture.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return picture.convert("RGB")
