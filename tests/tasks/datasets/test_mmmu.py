"""MMMU from the hub's columns: options read as literals, open answers, questions with several pictures."""

from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.datasets import mmmu
from experiment_core_utils.tasks.datasets.mmmu import MMMU
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import BLUE, RED, plain, stored, write_hub


def choice(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"validation_Art_Theory_{number}",
        "question": "Who painted <image 1>?",
        "options": "['Monet', \"O'Keeffe\"]",
        "answer": "B",
        "question_type": "multiple-choice",
        "subfield": "Art Theory",
        "image_1": stored(plain(RED)),
        **changes,
    }


ROWS = [
    choice(1),
    choice(2, id="validation_Math_2", options="[]", answer="['1/2', '0.5']", question_type="open"),
    choice(3, image_2=stored(plain(BLUE))),
    choice(4, options="__import__('os').listdir()"),
    choice(5, answer="C"),
    choice(6, image_1=None),
    choice(7, options="[]", answer="24", question_type="open", image_1=None, image_2=stored(plain(BLUE))),
    choice(8, answer=None),
    choice(9, question_type="multiple_choice", answer="A"),
    choice(10, options="[]", answer="[0, 1)", question_type="open"),
    choice(11, question_type="essay"),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> MMMU:
    folder = tmp_path_factory.mktemp("mmmu")
    # The unmerged copy has a folder for each subject.
    write_hub(folder / "Art_Theory", "validation", layouts.MMMU, ROWS[:3])
    write_hub(folder / "Math", "validation", layouts.MMMU, ROWS[3:])
    return MMMU(data_dir=folder, cache_dir=folder)


def test_multiple_choice(task: MMMU) -> None:
    sample = task[0]
    assert (sample.options, sample.answer_index, sample.answers) == (("Monet", "O'Keeffe"), 1, ("O'Keeffe",))
    assert (sample.image_id, sample.question_type) == ("validation_Art_Theory_1", "Art_Theory")
    assert sample.metadata["num_images"] == 1 and sample.metadata["question_format"] == "multiple-choice"
    assert sample.metadata["subfield"] == "Art Theory"
    assert task.prompt(sample) == " User: a_okvqa_mc: Who painted <image 1>?\nA: Monet\nB: O'Keeffe\n Assistant:"


def test_several_pictures(task: MMMU) -> None:
    sample = task[2]
    assert [each.getpixel((0, 0)) for each in sample.images] == [RED, BLUE]
    assert sample.metadata["num_images"] == 2 and len((sample.picture_sha256 or "").split()) == 2
    assert task.data_sha256(2) != task.data_sha256(0)


def test_open_questions(task: MMMU) -> None:
    sample = task[1]
    assert (sample.options, sample.answer_index, sample.answers) == ((), None, ("1/2", "0.5"))
    assert task.question_type(1) == "Math" and len(task) == 11
    assert task.prompt(sample) == " User: vqa2: Who painted <image 1>? Assistant:"
    only_second = task[6]
    assert only_second.answers == ("24",)
    assert only_second.image is not None and only_second.image.getpixel((0, 0)) == BLUE


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (3, r"options of validation_Art_Theory_4 is not a list: .*listdir"),
        (4, "the answer of validation_Art_Theory_5 is 'C', none of its 2 options"),
        (5, "question validation_Art_Theory_6 has no pictures"),
    ],
)
def test_a_row_that_cannot_be_used_fails_alone(task: MMMU, index: int, reason: str) -> None:
    with pytest.raises(SampleError, match=f"^mmmu validation sample {index}: {reason}"):
        task[index]


def test_subjects() -> None:
    assert mmmu.subject_of("validation_Architecture_and_Engineering_14") == "Architecture_and_Engineering"
    assert mmmu.subject_of("dev_Art_1") == "Art"


def test_other_spellings_and_rows_that_are_none(task: MMMU) -> None:
    assert task[8].answers == ("Monet",)
    assert task[9].answers == ("[0, 1)",)
    with pytest.raises(SampleError, match="validation sample 7: a row is not as in .*MMMU \\(TypeError"):
        task[7]
    with pytest.raises(SampleError, match="is of type 'essay', not multiple-choice or open"):
        task[10]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": r"['\ud800', 'b']", "answer": "A"}, r"'\\ud800' is among the answers or options"),
        ({"options": "[{}, 'b']", "answer": "B"}, "contains {}, neither a text nor a number"),
        ({"options": "[" * 5000, "answer": "A"}, "is not a list: .*5002 characters"),
        ({"options": "['a']*10**9", "answer": "A"}, "is not a list"),
    ],
)
def test_options_that_no_tokenizer_takes_fail_alone(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write_hub(tmp_path, "validation", layouts.MMMU, [choice(1, **changes)])
    with pytest.raises(SampleError, match=words):
        MMMU(data_dir=folder, cache_dir=tmp_path)[0]
