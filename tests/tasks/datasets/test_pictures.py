"""Pictures as they come: turned, truncated, 16-bit, transparent, huge, missing."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.pictures import open_picture
from tests.tasks.datasets.layouts import BLUE, RED, encoded, plain


def test_a_picture_is_turned_upright() -> None:
    lying = Image.new("RGB", (40, 20), RED)
    lying.paste(BLUE, (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to show it
    upright = open_picture(encoded(lying, "JPEG", exif=exif, quality=95), "turned")
    assert upright.size == (20, 40)
    # Clockwise, the left half comes to the top.
    top, bottom = upright.getpixel((10, 5)), upright.getpixel((10, 35))
    assert top[0] > 200 > 60 > top[2] and bottom[2] > 200 > 60 > bottom[0]


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    picture = open_picture(encoded(Image.fromarray(values)), "grey")
    assert picture.mode == "RGB"
    # 32768 * 255 / 65535 = 127.5, rounded up.
    assert [picture.getpixel((x, 0)) for x in range(4)] == [(v, v, v) for v in (0, 1, 128, 255)]


def test_transparent_pixels_are_white() -> None:
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (255, 0, 0, 255))
    opened = open_picture(encoded(picture), "transparent")
    assert [opened.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), RED]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9])
    assert open_picture(encoded(palette, transparency=0), "palette").getpixel((0, 0)) == (255, 255, 255)


def test_a_truncated_picture_is_one_failed_sample() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for kind in ("JPEG", "PNG"):
        content = encoded(noise, kind)
        with pytest.raises(SampleError, match=r"^picture cut cannot be read: .+$"):
            open_picture(content[: len(content) // 2], "cut")
    for content in (b"", b"<html>not found</html>"):
        with pytest.raises(SampleError, match="picture page cannot be read: it is in no known picture format"):
            open_picture(content, "page")


@pytest.mark.parametrize(("width", "height"), [(10_000, 9_000), (60_000, 60_000)])
@pytest.mark.parametrize("pillows_limit", [Image.MAX_IMAGE_PIXELS, None], ids=["limit", "no_limit"])
def test_a_huge_picture_is_refused_before_it_is_decoded(
    width: int, height: int, pillows_limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillows_limit)  # other libraries switch it off

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(SampleError, match=r"^picture bomb is too large: .+$"):
        open_picture(bomb, "bomb")


def test_unknown_ranges_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="mode F, whose range is not stated"):
        open_picture(encoded(Image.new("F", (2, 2), 0.5), "TIFF"), "depth")
    with pytest.raises(SampleError, match=r"picture gone is missing: there is no file .*a\.jpg"):
        open_picture(tmp_path / "a.jpg", "gone")
    (tmp_path / "b.png").write_bytes(plain(BLUE))
    assert open_picture(tmp_path / "b.png", "there").getpixel((0, 0)) == BLUE
