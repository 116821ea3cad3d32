"""DocVQA from the hub's columns and from the official files, with and without question types."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.tasks.datasets.doc_qa import DocVQA
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import RED, plain, stored, write_hub, write_json, write_picture

ENTRY: dict[str, Any] = {
    "questionId": 49153,
    "question": "What is the ‘actual’ value per 1000, during the year 1975?",
    "image": "documents/pybv0228_81.png",
    "docId": 14465,
    "ucsf_document_id": "pybv0228",
    "ucsf_document_page_no": "81",
    "answers": ["0.28"],
    "data_split": "val",
}


def official(folder: Path) -> Path:
    write_json(folder / "val_v1.0.json", {"data": [{**ENTRY, "answers": ["not this file"]}]})
    content = {"dataset_split": "val", "data": [{**ENTRY, "question_types": ["table/list", "figure/diagram"]}]}
    write_json(folder / "val_v1.0_withQT.json", content)
    write_picture(folder / "val" / "documents" / "pybv0228_81.png", plain(RED))
    return folder


def basenames(folder: Path) -> Path:
    official(folder)
    (folder / "val").rename(folder / "kept_elsewhere")
    write_picture(folder / "spdocvqa_images" / "pybv0228_81.png", plain(RED))
    return folder


def hub(folder: Path) -> Path:
    row = {**ENTRY, "questionId": "49153", "question_types": ["figure/diagram", "table/list"],
           "image": stored(plain(RED))}  # fmt: skip
    return write_hub(folder / "DocVQA", "validation", layouts.DOC_VQA, [row]).parent


@pytest.mark.parametrize("layout", [official, basenames, hub])
def test_doc_qa(tmp_path: Path, layout: Any) -> None:
    task = DocVQA(data_dir=layout(tmp_path), cache_dir=tmp_path)
    sample = task[0]
    assert sample.image is not None and sample.image.getpixel((0, 0)) == RED
    assert (sample.image_id, sample.answers) == ("pybv0228_81", ("0.28",))
    assert sample.question_type == "figure/diagram+table/list"
    assert sample.metadata["question_id"] == "49153" and sample.metadata["docId"] == 14465
    assert task.prompt(sample) == (
        " User: doc_qa: What is the ‘actual’ value per 1000, during the year 1975? Assistant:"
    )


def test_without_question_types_all_are_of_one(tmp_path: Path) -> None:
    write_json(tmp_path / "val_v1.0.json", {"data": [ENTRY]})
    assert DocVQA(data_dir=tmp_path).question_type(0) == "all"
