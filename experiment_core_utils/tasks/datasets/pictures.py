"""In: the bytes or the file of a picture; out: an upright 8-bit RGB picture, or a `SampleError` of one line.

A picture that cannot be read is one failed sample, never the end of a run.
"""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from experiment_core_utils.primitives.errors import SampleError, first_line

# Above this a small file may claim more memory than a machine has; Pillow's own limit for a warning.
MAX_PIXELS = 89_478_485

# What Pillow's decoders raise for broken files, by format and by where the damage is.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    RuntimeError,
    struct.error,
    zlib.error,
)
_HUGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def open_picture(content: bytes | Path, name: str) -> Image.Image:
    """The picture as RGB: turned as its EXIF orientation says, 16-bit grey scaled, transparency laid on white.

    Of a file with several frames it is the first.

    Args:
        content: the encoded picture, or the file that holds it.
        name: what an error calls it.

    Raises:
        SampleError: missing, truncated, not a picture, more than `MAX_PIXELS` pixels, or grey values whose range is
            not stated (32-bit and floating-point pixels).
    """
    if isinstance(content, Path) and not content.is_file():
        raise SampleError(f"picture {name} is missing: there is no file {content}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise SampleError(
                        f"picture {name} is too large: {picture.width} x {picture.height} pixels, at most {MAX_PIXELS}"
                    )
                picture.load()
                return _rgb(ImageOps.exif_transpose(picture), name)
    except _HUGE as error:
        raise SampleError(f"picture {name} is too large: {first_line(error)}") from error
    except UnidentifiedImageError as error:
        # Pillow's message holds the address of a buffer, different in every run.
        raise SampleError(f"picture {name} cannot be read: it is in no known picture format") from error
    except _BROKEN as error:
        raise SampleError(f"picture {name} cannot be read: {first_line(error)}") from error


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
