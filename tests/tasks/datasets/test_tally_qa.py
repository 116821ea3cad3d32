"""TallyQA: one question, one sample, its own answer; from the hub's columns and from the official list."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.tasks.datasets.tally_qa import TallyQA
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import GREEN, RED, plain, stored, write_hub, write_json, write_picture


def hub(folder: Path) -> Path:
    rows = [
        {
            "image": stored(plain(RED)),
            "qa": [
                {"question": "How many dogs?", "answer": "2", "is_simple": True},
                {"question": "How many dogs are asleep?", "answer": "0", "is_simple": False},
            ],
        },
        {"image": stored(plain(GREEN)), "qa": [{"question": "How many cups?", "answer": "15", "is_simple": True}]},
    ]
    return write_hub(folder / "data", "test", layouts.TALLY_QA, rows).parent


def official(folder: Path) -> Path:
    shared = {"image": "VG_100K_2/7.jpg", "image_id": 7}
    entries = [
        {**shared, "question": "How many dogs?", "answer": 2, "issimple": True, "question_id": 301},
        {**shared, "question": "How many dogs are asleep?", "answer": 0, "issimple": False, "question_id": 302},
        {"image": "val2014/COCO_val2014_000000000007.jpg", "image_id": 7, "question": "How many cups?", "answer": 15,
         "issimple": True, "question_id": 303},
    ]  # fmt: skip
    write_json(folder / "test.json", entries)
    write_picture(folder / "VG_100K_2" / "7.jpg", plain(RED))
    write_picture(folder / "val2014" / "COCO_val2014_000000000007.jpg", plain(GREEN))
    return folder


FROM_HUB = (["0-0", "0-1", "1-0"], ["row-0", "row-0", "row-1"])
FROM_FILES = (["301", "302", "303"], ["VG_100K_2/7.jpg"] * 2 + ["val2014/COCO_val2014_000000000007.jpg"])


@pytest.mark.parametrize(("layout", "names"), [(hub, FROM_HUB), (official, FROM_FILES)])
def test_every_question_is_a_sample_of_its_own(tmp_path: Path, layout: Any, names: Any) -> None:
    task = TallyQA("test", data_dir=layout(tmp_path), cache_dir=tmp_path)
    assert len(task) == 3
    samples = [task[index] for index in range(3)]
    assert [sample.answers for sample in samples] == [("2",), ("0",), ("15",)]
    assert [task.question_type(index) for index in range(3)] == ["simple", "complex", "simple"]
    assert ([sample.metadata["question_id"] for sample in samples], [sample.image_id for sample in samples]) == names
    assert [sample.image.getpixel((0, 0)) for sample in samples if sample.image] == [RED, RED, GREEN]
    assert task.prompt(samples[1]) == " User: tally_qa: How many dogs are asleep? Assistant:"


def test_training_questions_that_do_not_say_whether_they_are_simple(tmp_path: Path) -> None:
    write_json(tmp_path / "train.json", [{"image": "a.jpg", "question": "?", "answer": 1, "question_id": 1}])
    assert TallyQA("train", data_dir=tmp_path).question_type(0) == "all"
