"""Digests of samples, by hashlib on what they are made of, and what is refused where a sample changes."""

import hashlib
import json
import time
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image

from experiment_core_utils.primitives.errors import DataChanged, SampleError
from experiment_core_utils.tasks.content import digest_of, digests_of, pixel_digest, read_unchanged, with_picture_digest
from experiment_core_utils.tasks.interface import Sample
from experiment_core_utils.tasks.registry import load_data_file, load_task


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class OwnTask:
    """Somebody's own: it opens pictures by itself and says nothing of their content."""

    name, split, metric, max_new_tokens = "own", "all", "em", 4
    source: ClassVar = {"read_from": "test"}

    def __init__(self, colours: list[tuple[int, int, int] | None]) -> None:
        self.colours = colours

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        if index == 2:
            raise KeyError("no such row")
        if index == 3:
            time.sleep(5)
        colour = self.colours[index]
        image = None if colour is None else Image.new("RGB", (2, 1), colour)
        return Sample(index, "same name", "what?", ("a", "b"), image, "all", options=("b", "c"), answer_index=0)

    def question_type(self, index: int) -> str:
        return "all"

    def prompt(self, sample: Sample) -> str:
        return sample.question


RED, BLUE = (255, 0, 0), (0, 0, 255)
WORDS = ["what?", ["a", "b"], ["b", "c"], 0]


def test_a_sample_is_its_words_and_its_picture() -> None:
    red, text = (with_picture_digest(OwnTask([RED, None])[index]) for index in (0, 1))
    pixels = sha256(b"RGB 2 1 " + bytes([255, 0, 0, 255, 0, 0]))
    assert (red.picture_sha256, text.picture_sha256) == (pixels, None)
    assert digest_of(red) == sha256(json.dumps([*WORDS, pixels]).encode())
    assert digest_of(text) == sha256(json.dumps([*WORDS, None]).encode())


def test_the_samples_of_a_task_of_ones_own_are_made_once_and_those_out_of_time_are_not_known() -> None:
    found = digests_of(OwnTask([RED, None]), [3, 1, 2, 0], 0.2)
    of_picture = with_picture_digest(OwnTask([RED, None])[0])
    assert found == {1: sha256(json.dumps([*WORDS, None]).encode()), 0: digest_of(of_picture)}
    assert digests_of(load_task("reference_vqa"), [3, 1], None) is None


def test_another_picture_under_the_same_name_is_refused() -> None:
    before = dict(digests_of(OwnTask([RED, None]), [0, 1], None) or {})
    assert read_unchanged(OwnTask([RED, None]), 0, before).question == "what?"
    with pytest.raises(DataChanged, match="^sample 0 of own has changed since this run began: put the former data"):
        read_unchanged(OwnTask([BLUE, None]), 0, before)
    # One that could not be read before is known from its first reading on.
    before.pop(0)
    assert read_unchanged(OwnTask([BLUE, None]), 0, before).image_id == "same name"
    with pytest.raises(DataChanged, match="sample 0 of own"):
        read_unchanged(OwnTask([RED, None]), 0, before)


def test_a_picture_file_that_changes_is_named_even_where_it_cannot_be_decoded_any_more(tmp_path: Path) -> None:
    picture = tmp_path / "a.bmp"
    Image.new("RGB", (8, 8), "red").save(picture)
    (tmp_path / "my.jsonl").write_text(
        '{"image": "a.bmp", "question": "Q?", "answer": "x"}\n{"image": "b.bmp", "question": "Q?", "answer": "x"}\n{'
    )
    task = load_data_file(tmp_path / "my.jsonl")
    before = dict(digests_of(task, [0, 1, 2], None) or {})
    assert before == {0: digest_of(task[0])}
    assert task[0].picture_sha256 == sha256(picture.read_bytes())
    size = picture.stat().st_size
    for content in (b"x" * size, bytes([*picture.read_bytes()[:-1], 7])):
        picture.write_bytes(content)
        with pytest.raises(DataChanged, match=r"^sample 0 of my \(picture a.bmp\) has changed since this run began"):
            read_unchanged(task, 0, before)
    # One that is gone is a failed sample, as always.
    picture.unlink()
    with pytest.raises(SampleError, match=r"picture a.bmp is missing"):
        read_unchanged(task, 0, before)


def test_a_digest_is_of_pixels_sides_and_mode() -> None:
    picture = Image.new("RGB", (4, 5), "red")
    one_pixel_other = picture.copy()
    one_pixel_other.putpixel((3, 4), (254, 0, 0))
    # The bytes of the last two are those of the first.
    turned = Image.frombytes("RGB", (5, 4), picture.tobytes())
    other_mode = Image.frombytes("YCbCr", (4, 5), picture.tobytes())
    assert pixel_digest(picture) == pixel_digest(picture.copy())
    assert len({pixel_digest(each) for each in (picture, one_pixel_other, turned, other_mode)}) == 4
