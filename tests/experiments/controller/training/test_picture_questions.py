"""Pictures are distinguished by their pixels, their sides and their mode."""

from PIL import Image

from experiments.controller.training.recorded_states import picture_digest


def test_a_digest_is_of_pixels_sides_and_mode() -> None:
    picture = Image.new("RGB", (4, 5), "red")
    one_pixel_other = picture.copy()
    one_pixel_other.putpixel((3, 4), (254, 0, 0))
    # The bytes of the last two are those of the first.
    turned = Image.frombytes("RGB", (5, 4), picture.tobytes())
    other_mode = Image.frombytes("YCbCr", (4, 5), picture.tobytes())
    assert picture_digest(picture) == picture_digest(picture.copy())
    assert len({picture_digest(each) for each in (picture, one_pixel_other, turned, other_mode)}) == 4
