"""Pictures as a request carries them."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from experiment_core_utils.models.endpoint.pictures import data_url, png_tensor, scaled


def opened(url: str) -> Image.Image:
    kind, _, content = url.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def test_a_picture_arrives_as_it_is() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    png = png_tensor(Image.fromarray(pixels))
    for side in (None, 7, 100):
        assert (np.asarray(opened(data_url(png, side))) == pixels).all()


@pytest.mark.parametrize(
    ("size", "side", "expected"), [((60, 20), 30, (30, 10)), ((7, 100), 10, (1, 10)), ((3, 1000), 10, (1, 10))]
)
def test_a_larger_one_is_scaled_down(size: tuple[int, int], side: int, expected: tuple[int, int]) -> None:
    assert scaled(size, side) == expected
    assert opened(data_url(png_tensor(Image.new("RGB", size)), side)).size == expected
