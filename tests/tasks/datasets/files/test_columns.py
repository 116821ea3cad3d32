"""Columns with names near to ours: what is refused with the way to read it, what is taken, and what is none of ours."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.requests.drawing import open_task
from experiment_core_utils.tasks.datasets.files.columns import mapping_of
from experiment_core_utils.tasks.interface import Answer, Task
from experiment_core_utils.tasks.registry import get_metric, load_data_file
from tests.tasks.datasets.layouts import BLUE, RED, plain, write_picture

QUESTION = {"question": "Which colour is the shape?", "answer": "red"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in {"a": RED, "b": BLUE}.items():
        write_picture(tmp_path / "p" / f"{name}.png", plain(colour))
    return tmp_path


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "my.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def refusal(path: Path, *columns: str, metric: str | None = None, **given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_data_file(path, metric, columns=mapping_of(columns), **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def reason(task: Task, index: int) -> str:
    with pytest.raises(SampleError) as caught:
        task[index]
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "images", "image_path", "Image", "IMAGE", "img", "picture", "pictures", "photo", "pic", "screenshot",
        "img_path", "imagePath", "ImageFile", "image_file", "image_filename", "img_filename", "picture_file",
        "decoded_image", "image_url", "input image", "image1",
        # By what is in it, whatever it is called.
        "file", "filepath", "file_path", "filename", "file_name", "path", "url", "image_id", "source", "Bild",
    ],
)  # fmt: skip
def test_a_picture_under_another_name_is_never_left_out(folder: Path, name: str) -> None:
    path = jsonl(folder, QUESTION | {name: "p/a.png"})
    quoted = f"'{name}'" if " " in name else name
    assert refusal(path).endswith(
        f"has no image, and {name} would not be read: give --columns image={quoted}, or --text_only to leave the "
        "pictures out"
    )
    (sample,) = [load_data_file(path, columns=mapping_of([f"image={name}"]))[0]]
    assert sample.image is not None and sample.image.getpixel((0, 0)) == RED
    assert name not in sample.metadata
    assert load_data_file(path, text_only=True)[0].images == ()


@pytest.mark.parametrize(
    "row",
    [{"image_id": "12"}, {"image_id": 7}, {"url": "https://example.org/page"}, {"path": "notes"}, {"num_images": 2},
     {"image_width": 30}, {"img_type": "chart"}, {"images": []}, {"picture": None}, {"image": "", "images": ""},
     {"choices": "both"}, {"a": 3, "b": 4}, {"category": "colour"}],
)  # fmt: skip
def test_columns_of_other_things_stay_metadata(folder: Path, row: dict[str, Any]) -> None:
    task = load_data_file(jsonl(folder, QUESTION | row))
    assert task.metric == "em_lenient" and task[0].images == () and task[0].options == ()


def test_the_key_of_the_picture_may_change_from_row_to_row(folder: Path) -> None:
    first, second = QUESTION | {"image_path": "p/a.png"}, QUESTION | {"Image": "p/b.png"}
    assert "and image_path, Image would not be read: give --columns image=Image" in refusal(
        jsonl(folder, first, second)
    )
    task = load_data_file(jsonl(folder, first, second, QUESTION), columns={"image": "image_path"})
    assert task[0].image is not None and task[2].image is None
    assert reason(task, 1) == "my.jsonl line 2: it has no image, and its Image would not be read; call it image"


@pytest.mark.parametrize(
    ("header", "pairs"),
    [
        ("Question,Answer", "question=Question answer=Answer"),
        ("prompt,label", "question=prompt answer=label"),
        ("query,ground_truth", "question=query answer=ground_truth"),
        ("instruction,target", "question=instruction answer=target"),
        ("text,gt", "question=text answer=gt"),
        ("Q,A", "question=Q answer=A"),
        ("input,output", "question=input answer=output"),
        ("problem,gold", "question=problem answer=gold"),
    ],
)
def test_questions_and_answers_under_other_names(folder: Path, header: str, pairs: str) -> None:
    path = folder / "my.csv"
    path.write_text(f"{header}\nWhich?,red\n")
    assert refusal(path).endswith(f"would not be read: give --columns {pairs}")
    (sample,) = [load_data_file(path, columns=mapping_of(pairs.split()))[0]]
    assert (sample.question, sample.answers) == ("Which?", ("red",))


def test_all_that_is_missing_is_said_at_once(folder: Path) -> None:
    path = folder / "my.csv"
    path.write_text("img,prompt,label,candidates\np/a.png,Which?,red,\"['red' 'blue']\"\n")
    assert (
        "has no image, question, answer, options, and img, prompt, label, candidates would not be read: give --columns "
        "image=img question=prompt answer=label options=candidates, or --text_only"
    ) in refusal(path)


def test_columns_of_letters_are_options(folder: Path) -> None:
    base = {"question": "Which colour is the shape?"}
    rows = [
        base | {"image": "p/a.png", "A": "blue", "B": "red", "answer": "B"},
        base | {"A": "red", "B": "blue", "C": None, "D": float("nan"), "answer": "red"},
        base | {"A": "B", "B": "A", "C": "", "D": "NaN", "answer": "b"},
        base | {"A": "one", "B": "two", "D": "four", "answer": "D"},
        base | {"A": "one", "B": "two", "answer": "C"},
    ]
    task = load_data_file(jsonl(folder, *rows))
    assert task.metric == "mc"
    found = [(task[index].options, task[index].answer_index) for index in range(3)]
    # A letter is a letter first of all where the options have columns of letters.
    assert found == [(("blue", "red"), 1), (("red", "blue"), 0), (("B", "A"), 1)]
    right = Answer("red", task[0].answers, task[0].options, task[0].answer_index)
    assert get_metric("mc").score([right]).overall == 1.0
    assert "its options are A, B, D, with an empty one between them; close the gap" in reason(task, 3)
    assert "its answer is 'C', which is neither one of its options nor a letter of one" in reason(task, 4)
    assert task[0].metadata == {"row": "my.jsonl line 1"}


def test_a_hint_beside_columns_of_letters_is_part_of_the_question(folder: Path) -> None:
    row = {"question": "Which?", "answer": "A", "hint": "Look left."}
    assert load_data_file(jsonl(folder, row | {"A": "x", "B": "y"}))[0].question == "Look left.\nWhich?"
    assert load_data_file(jsonl(folder, row))[0].question == "Which?"


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"choices": ["red", "blue"]}, "options=choices"),
        ({"candidates": "['red' 'blue']"}, "options=candidates"),
        ({"Options": ["red", "blue"]}, "options=Options"),
        ({"answer_choices": ["red", "blue"]}, "options=answer_choices"),
        ({"option_b": "blue", "option_a": "red"}, "A=option_a B=option_b"),
        ({"a": "red", "b": "blue"}, "A=a B=b"),
        ({"option1": "red", "option2": "blue"}, "A=option1 B=option2"),
        ({"choice_0": "red", "choice_1": "blue"}, "A=choice_0 B=choice_1"),
        ({"optionA": "red", "optionB": "blue"}, "A=optionA B=optionB"),
        ({"opa": "red", "opb": "blue"}, "A=opa B=opb"),
        ({"mc_option_text_a": "red", "mc_option_text_b": "blue"}, "A=mc_option_text_a B=mc_option_text_b"),
        ({"ending0": "red", "ending1": "blue"}, "A=ending0 B=ending1"),
    ],
)
def test_options_under_other_names_do_not_become_an_open_question(
    folder: Path, options: dict[str, Any], pairs: str
) -> None:
    path = jsonl(folder, QUESTION | options)
    assert refusal(path).endswith(f"would not be read: give --columns {pairs}")
    task = load_data_file(path, columns=mapping_of(pairs.split()))
    assert task.metric == "mc" and task[0].options == ("red", "blue") and task[0].answer_index == 0


def test_a_row_with_options_under_another_name_fails_alone(folder: Path) -> None:
    choice = QUESTION | {"options": ["red", "blue"]}
    task = load_data_file(jsonl(folder, choice, QUESTION | {"choices": ["red", "blue"]}))
    assert "line 2: it has no options, and its choices would not be read; call it options" in reason(task, 1)


def test_a_mapping_names_columns_of_ours_and_of_the_file(folder: Path) -> None:
    path = jsonl(folder, QUESTION | {"image_path": "p/a.png", "prompt": "Which one?"})
    assert "my.jsonl has no column imagepath (did you mean image_path?)" in refusal(path, "image=imagepath")
    assert "picture is no column of ours (did you mean image?)" in refusal(path, "picture=image_path")
    assert "quetsion is no column of ours (did you mean question?)" in refusal(path, "quetsion=prompt")
    assert "--columns image is not NAME=COLUMN; write it as" in refusal(path, "image")
    assert "--columns names image twice" in refusal(path, "image=a", "image=b")
    # What is given counts, also where the file has a column of that name.
    task = load_data_file(path, columns={"question": "prompt", "image": "image_path"})
    assert task[0].question == "Which one?" and len(task[0].images) == 1


@pytest.mark.parametrize(
    ("row", "flags", "expected"),
    [
        ({"question_type": "chart"}, [], "chart"),
        ({"question_type": "chart", "type": "bar"}, [], "bar"),
        ({"question_type": "chart", "kind": "count"}, ["--type_column", "kind"], "count"),
        ({"kind": "count"}, [], "all"),
    ],
)
def test_the_type_of_a_question_is_in_a_column_of_its_name_or_the_named_one(
    folder: Path, row: dict[str, Any], flags: list[str], expected: str
) -> None:
    path = jsonl(folder, QUESTION | row)
    task = open_task(parse_config(["--data_file", str(path), *flags]).task)
    assert task is not None and task.question_type(0) == expected


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--data_file", "my.jsonl", "--type_column", "kin"], "--columns type=kin: .* has no column kin.*did you mean"),
        (["--data_file", "my.jsonl", "--type_column", "kind", "--columns", "type=kind"], "names type twice .--type_co"),
        (["--type_column", "kind"], "--type_column is for the rows of --data_file, which is not given; drop it"),
    ],
)
def test_a_column_of_types_that_cannot_be_is_refused(
    folder: Path, flags: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(folder, QUESTION | {"kind": "count"})
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError, match=why):
        open_task(parse_config(flags).task)


def test_several_pictures_of_a_row(folder: Path) -> None:
    both = ["p/a.png", "p/b.png"]
    rows = [
        QUESTION | {"image": both}, QUESTION | {"image": json.dumps(both)},
        QUESTION | {"image": "['p/a.png' 'p/b.png']"},
        QUESTION | {"image_1": both[0], "image_2": both[1]}, QUESTION | {"image_1": "", "image_2": both[1]},
        QUESTION | {"image": both[0], "image_2": both[1]}, QUESTION | {"image": [both]}, QUESTION | {"image": ["gone"]},
    ]  # fmt: skip
    task = load_data_file(jsonl(folder, *rows))
    colours = [[each.getpixel((0, 0)) for each in task[index].images] for index in range(4)]
    assert colours == 4 * [[RED, BLUE]]
    assert task[0].image is task[0].images[0] or task[0].image == task[0].images[0]
    digests = (task[0].picture_sha256 or "").split()
    assert len(digests) == 2 and digests[0] != digests[1]
    assert {task[index].picture_sha256 for index in range(4)} == {" ".join(digests)}
    assert "it has pictures in image, image_2; give image or image_1, image_2" in reason(task, 5)
    assert "a list with something else than pictures in it" in reason(task, 6)
    assert "picture gone is missing" in reason(task, 7)
    gap = load_data_file(jsonl(folder, rows[3], rows[4]))
    assert "its pictures are image_2, with an empty one before the last; close the gap" in reason(gap, 1)
    assert "those in image_0 are not read: call all of them image_1, image_2" in refusal(
        jsonl(folder, QUESTION | {"image_0": both[0], "image_1": both[1]})
    )
    assert "give --columns image_1=img1 image_2=img2" in refusal(
        jsonl(folder, QUESTION | {"img1": both[0], "img2": both[1]})
    )


def test_references_are_checked_in_every_row(folder: Path) -> None:
    rows = [{"question": "c?", "answers": ["", ""]}, {"question": "d?", "answers": ["x", ""]}, QUESTION]
    task = load_data_file(jsonl(folder, *rows))
    for index in (0, 1):
        assert f"line {index + 1}: an answer of it is empty; leave that out, or the row" in reason(task, index)
    # The prediction is stripped before it is compared, the reference is not.
    spaced = load_data_file(jsonl(folder, QUESTION, QUESTION | {"answer": "red "}), "em")
    assert reason(spaced, 1) == "my.jsonl line 2: --metric em gives even its right answer 'red ' 0"
    assert [each.partition(":")[0] for each in spaced.faults(range(2))] == ["my.jsonl line 2"]
    alone = refusal(jsonl(folder, QUESTION | {"answer": "red "}), metric="em")
    assert alone == (
        "--metric em gives even the right answer 'red ' of my.jsonl line 1 0; choose one that gives it its best, such "
        "as em_lenient or relaxed"
    )


def test_what_a_metric_cannot_give_in_full_is_said(folder: Path) -> None:
    three, ten = QUESTION | {"answers": 3 * ["red"]}, QUESTION | {"answers": [str(number) for number in range(10)]}
    for row in (three, ten):
        del row["answer"]
    # Of fewer than four references the metric gives the fraction that matches.
    assert load_data_file(jsonl(folder, three), "vqa_score").remarks == []
    # Ten annotators who disagree are as published: the row counts, and it is said.
    task = load_data_file(jsonl(folder, three | {"answers": 10 * ["red"]}, ten), "vqa_score")
    (remark,) = task.remarks
    assert remark == (
        "1 of 2 rows cannot reach 1 by vqa_score: even the right answer gets less, the first is my.jsonl line 2 (0.3, "
        "of 10 answers)"
    )
    assert list(task.faults(range(2))) == []


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("options_list", ["red", "blue"]), ("mc_choices", "['red', 'blue']"), ("answerOptions", ["red", "blue"]),
        ("choices", "red, blue"), ("mc1_targets", {"choices": ["red", "blue"], "labels": [1, 0]}),
        ("choices", "A. red\nB. blue"), ("choices", "red|blue"), ("candidate_choices", {"text": ["red", "blue"]}),
    ],
)  # fmt: skip
def test_columns_with_a_word_for_options_are_named(folder: Path, name: str, cell: Any) -> None:
    assert refusal(jsonl(folder, QUESTION | {name: cell})).endswith(
        f"has no options, and {name} would not be read: give --columns options={name}"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"distractor1": "blue", "distractor2": "green"},
        {"distractors": ["blue"]},
        {"incorrect_answers": "['blue', 'green']"},
        {"wrong_answer": "blue"},
    ],
)
def test_options_without_the_right_one_are_named(folder: Path, more: dict[str, Any]) -> None:
    assert f"has no options, and the wrong ones in {', '.join(more)} would not be read: write them and the" in refusal(
        jsonl(folder, QUESTION | more)
    )


def test_scores_of_options_are_no_options(folder: Path) -> None:
    row = {"option_scores": [0.1, 0.9], "num_choices": 2, "num_distractors": 3, "tags": ["blue", "green"]}
    assert load_data_file(jsonl(folder, QUESTION | row)).remarks == []  # type: ignore[attr-defined]


def test_a_list_with_the_answer_in_it_is_named(folder: Path) -> None:
    """It may be the options, or the objects in a picture."""
    path = jsonl(folder, QUESTION | {"pool": ["red", "blue"]}, QUESTION | {"pool": None}, QUESTION | {"pool": ["red"]})
    assert load_data_file(path).remarks == []  # type: ignore[attr-defined]
    path = jsonl(folder, QUESTION | {"pool": ["red", "blue"]}, QUESTION | {"pool": "['green' 'red']"}, QUESTION)
    assert load_data_file(path).remarks == [  # type: ignore[attr-defined]
        "pool contains the right answer among others and is not read: if these are the options, give --columns "
        "options=pool"
    ]


def test_pictures_under_another_name_are_left_out_with_a_remark(folder: Path) -> None:
    path = jsonl(folder, QUESTION | {"images": ["p/a.png"]}, QUESTION, QUESTION | {"images": ["p/b.png"]})
    task = load_data_file(path, text_only=True)
    assert task.remarks == ["--text_only: the pictures of 2 rows are left out"]  # type: ignore[attr-defined]
    assert task[0].images == ()
