"""ST-VQA from the official training file: Molmo's split of it, paths, types."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.content import digest_of
from experiment_core_utils.tasks.datasets.st_qa import SceneTextQA
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import GREEN, plain, stored, write_hub, write_json, write_picture

ROWS = 1030
# numpy's legacy generator is frozen: RandomState(63069).shuffle(list(range(1030))) is the same in all releases.
FIRST_AND_LAST = ["432", "34", "422", "427"]
REST = ["48", "774", "593", "395", "137", "731"]


def entry(number: int) -> dict[str, Any]:
    return {"question_id": number, "question": f"What is {number}?", "answers": [f"{number}", "it"],
            "file_path": f"coco-text/{number % 3}.jpg", "dataset": "coco-text", "set_name": "train"}  # fmt: skip


def official(folder: Path, rows: int = ROWS) -> Path:
    # The last id first: the split does not depend on the file's order.
    write_json(folder / "train_task_3.json", {"data": [entry(number) for number in reversed(range(rows))]})
    for number in range(3):
        write_picture(folder / "coco-text" / f"{number}.jpg", plain(GREEN))
    return folder


def test_validation_is_molmos_and_train_the_rest(tmp_path: Path) -> None:
    official(tmp_path)
    validation, train = SceneTextQA(data_dir=tmp_path), SceneTextQA("train", data_dir=tmp_path)
    assert (len(validation), len(train)) == (1024, 6)
    assert [validation[index].metadata["question_id"] for index in (0, 1, 2, 1023)] == FIRST_AND_LAST
    assert [train[index].metadata["question_id"] for index in range(6)] == REST


def test_a_question(tmp_path: Path) -> None:
    task = SceneTextQA(data_dir=official(tmp_path, 1))
    sample = task[0]
    assert (sample.image_id, sample.question_type, sample.answers) == ("coco-text/0.jpg", "all", ("0", "it"))
    assert sample.metadata == {"question_id": "0", "dataset": "coco-text"}
    assert sample.image is not None and sample.image.getpixel((0, 0)) == GREEN
    assert task.prompt(sample) == " User: st_qa: What is 0? Assistant:"


def test_a_sample_is_known_by_the_content_of_its_picture_file(tmp_path: Path) -> None:
    task = SceneTextQA(data_dir=official(tmp_path, 1))
    (picture,) = tmp_path.rglob("0.jpg")
    assert task[0].picture_sha256 == hashlib.sha256(picture.read_bytes()).hexdigest()
    assert task.data_sha256(0) == digest_of(task[0])
    assert task.file_of(0) == "coco-text/0.jpg"
    picture.unlink()
    assert task.data_sha256(0) is None


def test_from_parquet(tmp_path: Path) -> None:
    row = {"question_id": 5, "question": "Where?", "image": stored(plain(GREEN), "a.jpg"), "answers": ["exit"]}
    task = SceneTextQA(data_dir=write_hub(tmp_path, "train", layouts.ST_VQA, [row]), cache_dir=tmp_path)
    assert (len(task), task[0].answers, task[0].image_id) == (1, ("exit",), "a")
    assert task[0].picture_sha256 == hashlib.sha256(row["image"]["bytes"]).hexdigest()
    assert task.data_sha256(0) == digest_of(task[0])
    with pytest.raises(ConfigurationError, match="st_qa train has no samples"):
        SceneTextQA("train", data_dir=tmp_path, cache_dir=tmp_path)
