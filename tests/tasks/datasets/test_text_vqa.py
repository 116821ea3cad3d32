"""TextVQA from the hub's columns and from the official file."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.tasks.datasets.text_vqa import TextVQA
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import BLUE, plain, stored, write_hub, write_json, write_picture

ENTRY = {"question": "what is the Brand of this camera?", "question_id": 34602, "image_id": "003a8ae2ef43b901",
         "answers": ["nous les gosses", *["dakota"] * 9]}  # fmt: skip


def official(folder: Path) -> Path:
    content = {"dataset_type": "val", "data": [{**ENTRY, "image_classes": ["Camera"]}]}
    write_json(folder / "TextVQA_0.5.1_val.json", content)
    write_picture(folder / "train_images" / "003a8ae2ef43b901.jpg", plain(BLUE))
    return folder


def hub(folder: Path) -> Path:
    row = {**ENTRY, "image": stored(plain(BLUE)), "ocr_tokens": ["DAKOTA"]}
    return write_hub(folder, "validation", layouts.TEXT_VQA, [row])


@pytest.mark.parametrize("layout", [official, hub])
def test_text_vqa(tmp_path: Path, layout: Any) -> None:
    task = TextVQA(data_dir=layout(tmp_path), cache_dir=tmp_path)
    sample = task[0]
    assert sample.image is not None and sample.image.getpixel((0, 0)) == BLUE
    assert (sample.image_id, sample.question_type) == ("003a8ae2ef43b901", "all")
    assert sample.answers == ("nous les gosses", *["dakota"] * 9)
    assert sample.metadata["question_id"] == "34602"
    assert task.prompt(sample) == " User: text_vqa: what is the Brand of this camera? Assistant:"
