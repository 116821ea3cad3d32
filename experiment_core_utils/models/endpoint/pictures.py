"""Pictures in a request to a server: PNG files in data URLs, scaled down where a side is requested."""

import base64
import io

import torch
from PIL import Image

from experiment_core_utils.tasks.datasets.pictures import open_picture

# Of zlib; pictures go over the loopback mostly, and more takes several times as long.
_COMPRESSION = 1


def png_tensor(picture: Image.Image) -> torch.Tensor:
    """The bytes [N] uint8 of a PNG file of an RGB picture; as a tensor, so that caches of requests know its size."""
    return torch.frombuffer(bytearray(_png(picture.convert("RGB"))), dtype=torch.uint8)


def data_url(png: torch.Tensor, longest_side: int | None) -> str:
    """A picture as a request carries it.

    Args:
        png: as `png_tensor` makes it.
        longest_side: in pixels; a larger picture is scaled down to it (bicubic), its shape kept. None leaves it.
    """
    content = png.numpy().tobytes()
    if longest_side is not None:
        picture = open_picture(content, "picture of a request").image
        if max(picture.size) > longest_side:
            content = _png(picture.resize(scaled(picture.size, longest_side), Image.Resampling.BICUBIC))
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def scaled(size: tuple[int, int], longest_side: int) -> tuple[int, int]:
    """(width, height) in pixels whose longer one is `longest_side`, the other rounded, at least 1."""
    factor = longest_side / max(size)
    width, height = (max(round(each * factor), 1) for each in size)
    return width, height


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=_COMPRESSION)
    return file.getvalue()
