"""ScienceQA from the hub's columns and from the official problems: hints, options, rows without a picture."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.science_qa import ScienceQAImages
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import GREEN, RED, plain, stored, write_hub, write_json, write_picture

TEXT_ONLY = {"question": "Which is a noun?", "choices": ["run", "cat"], "answer": 1, "hint": "", "image": None,
             "subject": "language science", "topic": "grammar"}  # fmt: skip
MAP = {"question": "Which state is farthest north?", "choices": ["Utah", "Maine", "Ohio"], "answer": 1, "hint": "",
       "image": "image.png", "subject": "social science", "topic": "geography"}  # fmt: skip
MAGNETS = {"question": "Will they attract?", "choices": ["attract", "repel"], "answer": 0,
           "hint": "Two magnets are placed as shown.", "image": "image.png", "subject": "natural science",
           "topic": "physics"}  # fmt: skip


def official(folder: Path) -> Path:
    write_json(folder / "problems.json", {"2": MAGNETS, "5": TEXT_ONLY, "9": MAP, "11": MAP})
    write_json(folder / "pid_splits.json", {"train": ["11"], "val": ["5", "9", "2"], "test": []})
    write_picture(folder / "images" / "val" / "9" / "image.png", plain(RED))
    write_picture(folder / "images" / "val" / "2" / "image.png", plain(GREEN))
    return folder


def hub(folder: Path) -> Path:
    rows = [
        TEXT_ONLY,
        {**MAP, "image": stored(plain(RED), "image.png")},
        {**MAGNETS, "image": stored(plain(GREEN), "image.png")},
    ]
    write_hub(folder / "ScienceQA-IMG", "validation", layouts.SCIENCE_QA, rows)
    write_hub(folder / "ScienceQA-FULL", "validation", layouts.SCIENCE_QA, rows * 2)
    return folder


@pytest.mark.parametrize(("layout", "ids"), [(official, ["9", "2"]), (hub, ["validation-1", "validation-2"])])
def test_science_qa(tmp_path: Path, layout: Any, ids: list[str]) -> None:
    task = ScienceQAImages(data_dir=layout(tmp_path), cache_dir=tmp_path)
    assert len(task) == 2  # the question without a picture is left out
    assert [task.question_type(index) for index in range(2)] == ["social science", "natural science"]
    first, second = task[0], task[1]
    assert [first.metadata["question_id"], second.metadata["question_id"]] == ids
    assert [first.image_id, second.image_id] == ids
    assert first.image is not None and first.image.getpixel((0, 0)) == RED
    assert second.image is not None and second.image.getpixel((0, 0)) == GREEN
    assert (first.options, first.answer_index, first.answers) == (("Utah", "Maine", "Ohio"), 1, ("Maine",))
    assert task.prompt(first) == (
        " User: science_qa: Which state is farthest north?\nA: Utah\nB: Maine\nC: Ohio\n Assistant:"
    )
    assert task.prompt(second) == (
        " User: science_qa: Two magnets are placed as shown.\nWill they attract?\nA: attract\nB: repel\n Assistant:"
    )
    assert second.metadata["hint"] == "Two magnets are placed as shown."
    assert second.metadata["topic"] == "physics"


def test_an_answer_that_is_no_option_fails_alone(tmp_path: Path) -> None:
    row = {**MAP, "answer": 3, "image": stored(plain(RED))}
    task = ScienceQAImages(data_dir=write_hub(tmp_path, "validation", layouts.SCIENCE_QA, [row]), cache_dir=tmp_path)
    with pytest.raises(SampleError, match="science_qa_img validation sample 0: the answer is option 3 of 3"):
        task[0]


def test_official_files_that_do_not_fit(tmp_path: Path) -> None:
    official(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"has problems.json but no pictures; put them in images/test/ or test/"
    ):
        ScienceQAImages("test", data_dir=tmp_path)
    write_json(tmp_path / "pid_splits.json", {"val": ["77"]})
    with pytest.raises(ConfigurationError, match="has no problem 77"):
        ScienceQAImages(data_dir=tmp_path)
