"""Pictures as they come: turned, truncated, 16-bit, transparent, huge, missing; and files that are none."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.pictures import FORMATS, MAX_PIXELS, PictureFolders, open_picture
from tests.tasks.datasets.layouts import BLUE, GREEN, RED, encoded, plain, write_picture

# Run by an interpreter, it would write a file.
POSTSCRIPT = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 9 9
%%EndComments
(written) (w) file closefile
showpage
"""


def test_a_picture_is_turned_upright() -> None:
    lying = Image.new("RGB", (40, 20), RED)
    lying.paste(BLUE, (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to show it
    upright = open_picture(encoded(lying, "JPEG", exif=exif, quality=95), "turned").image
    assert upright.size == (20, 40)
    # Clockwise, the left half comes to the top.
    top, bottom = upright.getpixel((10, 5)), upright.getpixel((10, 35))
    assert top[0] > 200 > 60 > top[2] and bottom[2] > 200 > 60 > bottom[0]


def test_a_picture_that_was_turned_is_not_turned_again_and_a_broken_header_goes_no_further() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(Image.new("RGB", (40, 20), RED), "JPEG", exif=exif)
    header = content.index(b"Exif\0\0MM") + 6
    broken = content[:header] + b"XX" + content[header + 2 :]
    # Processors turn what they are given by its header.
    for given, size in ((content, (20, 40)), (broken, (40, 20))):
        assert ImageOps.exif_transpose(open_picture(given, "turned").image).size == size


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    picture = open_picture(encoded(Image.fromarray(values)), "grey").image
    assert picture.mode == "RGB"
    # 32768 * 255 / 65535 = 127.5, rounded up.
    assert [picture.getpixel((x, 0)) for x in range(4)] == [(v, v, v) for v in (0, 1, 128, 255)]


def test_transparent_pixels_are_white() -> None:
    picture = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    picture.putpixel((1, 0), (255, 0, 0, 255))
    opened = open_picture(encoded(picture), "transparent").image
    assert [opened.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), RED]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9])
    assert open_picture(encoded(palette, transparency=0), "palette").image.getpixel((0, 0)) == (255, 255, 255)


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
    assert open_picture(tmp_path / "b.png", "there").image.getpixel((0, 0)) == BLUE


@pytest.mark.parametrize("kind", [*FORMATS, "MPO"])
def test_the_formats_that_are_read(kind: str, tmp_path: Path) -> None:
    # A second JPEG picture in the same file, as cameras write them, is left alone.
    more = {"save_all": True, "append_images": [Image.new("RGB", (6, 4), BLUE)]} if kind == "MPO" else {}
    write_picture(tmp_path / "named.wrongly", encoded(Image.new("RGB", (6, 4), GREEN), kind, **more))
    picture = open_picture(tmp_path / "named.wrongly", "plain").image
    assert (picture.mode, picture.size) == ("RGB", (6, 4))
    # Lossy formats keep a plain colour to a few of 255 levels.
    assert np.abs(np.subtract(picture.getpixel((3, 2)), GREEN)).max() <= 4


@pytest.mark.parametrize("kind", ["PPM", "ICO", "PCX", "TGA", "SGI", "PDF", "DDS"])
def test_other_formats_are_not_tried(kind: str) -> None:
    with pytest.raises(SampleError, match=r"in no known picture format \(JPEG, PNG, WEBP, GIF, BMP, TIFF\)"):
        open_picture(encoded(Image.new("RGB", (16, 16), RED), kind), "other")


def test_postscript_is_never_interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt("a process was started")

    for name in ("Popen", "check_call", "run"):
        monkeypatch.setattr(f"subprocess.{name}", run)
    monkeypatch.chdir(tmp_path)
    write_picture(tmp_path / "photo.jpg", POSTSCRIPT)
    with pytest.raises(SampleError, match="no known picture format"):
        open_picture(tmp_path / "photo.jpg", "photo")
    assert os.listdir(tmp_path) == ["photo.jpg"]


def test_pictures_are_opened_in_one_place() -> None:
    root = Path(__file__).parents[3]
    openers = [
        path.relative_to(root).as_posix()
        for folder in ("experiment_core_utils", "experiments", "scripts")
        for path in sorted((root / folder).rglob("*.py"))
        if "Image.open(" in path.read_text(encoding="utf-8")
    ]
    assert openers == ["experiment_core_utils/tasks/datasets/pictures.py"]


def test_what_is_no_picture_file_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    for path, message in (
        (tmp_path / "folder.jpg", "not a regular file"),
        (tmp_path / "pipe.jpg", "not a regular file"),
        (tmp_path / "zero.jpg", "not a regular file"),
        (tmp_path / "loop.jpg", "not a regular file"),
        (tmp_path / ("x" * 5000), r"is missing: there is no file .* \(\d+ characters\)$"),
        (tmp_path / "a\0b.jpg", r"is missing: there is no file .*a\\x00b.jpg$"),
    ):
        with pytest.raises(SampleError, match=message) as caught:
            open_picture(path, path.name)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_sizes_that_no_picture_has() -> None:
    empty = b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0, 0, 0) + b";"
    with pytest.raises(SampleError, match="picture empty (is empty: 0 x 0 pixels|cannot be read)"):
        open_picture(empty, "empty")
    bomb = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 30000, 30000, 1, 24, *[0] * 6)
    with pytest.raises(SampleError, match=f"picture bomb is too large: .*at most {MAX_PIXELS}"):
        open_picture(bomb, "bomb")


def test_pictures_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    write_picture(data / "train" / "in.png", plain(RED))
    write_picture(other / "out.png", plain(BLUE))
    (data / "train" / "link.png").symlink_to(other / "out.png")
    (data / "train" / "linked").symlink_to(other)
    (data / "train" / "within.png").symlink_to("in.png")
    roots, folders = [data / "train"], [data]
    inside = ("in.png", "sub/in.png", "within.png", str(data / "train" / "in.png"), "../train/in.png")
    for name in inside:
        found = PictureFolders(roots, folders).find(name)
        assert open_picture(found, name).image.getpixel((0, 0)) == RED
    for name in (str(other / "out.png"), "../../other/out.png", "link.png", "linked/out.png"):
        with pytest.raises(SampleError, match=r"^picture .* is not read: it is outside .*data \(an absolute path"):
            PictureFolders(roots, folders).find(name)
    # Where the folder has a file of that name itself, that one is meant.
    write_picture(data / "train" / "out.png", plain(RED))
    assert PictureFolders(roots, folders).find(str(other / "out.png")) == data / "train" / "out.png"
    # No folder of pictures: a path of the hub's rows, relative to nothing.
    with pytest.raises(SampleError, match="is not read: it is outside"):
        PictureFolders([], folders).find(str(other / "out.png"))
