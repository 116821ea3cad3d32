"""COCO captions from the hub's columns and from the official file: references, the picture's number, one prompt."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets.coco import CocoCaption
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import BLUE, GREEN, plain, stored, write_hub, write_json, write_picture

NAMES = ["COCO_val2014_000000391895.jpg", "COCO_val2014_000000000042.jpg"]
CAPTIONS = [f"A man rides motorcycle number {number}." for number in range(5)]


def official(folder: Path) -> Path:
    images = [{"id": 391895, "file_name": NAMES[0]}, {"id": 42, "file_name": NAMES[1]}]
    # Annotations come in no order of pictures; a caption's place among the five follows from its id.
    annotations = [{"image_id": 391895, "id": 100 + n, "caption": CAPTIONS[n]} for n in (3, 0, 4, 1, 2)]
    annotations.insert(2, {"image_id": 42, "id": 7, "caption": "Some shoes."})
    write_json(folder / "annotations" / "captions_val2014.json", {"images": images, "annotations": annotations})
    write_picture(folder / "val2014" / NAMES[0], plain(GREEN))
    write_picture(folder / "val2014" / NAMES[1], plain(BLUE))
    return folder


def hub(folder: Path) -> Path:
    rows = [
        {"question_id": NAMES[0], "image": stored(plain(GREEN)), "answer": CAPTIONS, "question": "Please.", "id": 1},
        {"question_id": NAMES[1], "image": stored(plain(BLUE)), "answer": ["Some shoes."], "question": "", "id": 2},
    ]  # fmt: skip
    return write_hub(folder / "data", "val", layouts.COCO_CAPTION, rows).parent


@pytest.mark.parametrize("layout", [official, hub])
def test_captions(tmp_path: Path, layout: Any) -> None:
    task = CocoCaption(data_dir=layout(tmp_path), cache_dir=tmp_path)
    assert len(task) == 2
    first, second = task[0], task[1]
    assert (first.image_id, first.answers) == ("391895", tuple(CAPTIONS))
    assert (second.image_id, second.answers, second.question_type) == ("42", ("Some shoes.",), "caption")
    assert first.metadata == {"question_id": NAMES[0]}
    assert second.image is not None and second.image.getpixel((0, 0)) == BLUE
    assert {task.prompt(first), task.prompt(second)} == {
        " User: coco_captioning: Provide a one-sentence caption for the provided image. Assistant:"
    }


def test_a_template_may_do_without_the_question(tmp_path: Path) -> None:
    task = CocoCaption(data_dir=official(tmp_path), prompt_template="A photo of")
    assert task.prompt(task[0]) == "A photo of"


def test_names_of_2017_and_names_that_are_none(tmp_path: Path) -> None:
    rows = [
        {"question_id": name, "image": stored(plain(GREEN)), "answer": ["x"]} for name in ("000000179765.jpg", "cat")
    ]
    task = CocoCaption(data_dir=write_hub(tmp_path, "val", layouts.COCO_CAPTION, rows), cache_dir=tmp_path)
    assert task[0].image_id == "179765"
    with pytest.raises(SampleError, match="question_id 'cat' is not the name of a COCO file"):
        task[1]
