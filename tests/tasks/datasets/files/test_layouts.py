"""Rows as data sets of the hub are laid out: questions, what is right, and advice that works when followed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.files.columns import mapping_of
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.datasets.files.layouts import columns_by_shape, unfolded

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Answer by a number."}
SAID = [{"from": "human", "value": "<image>\n2 + 2?"}, {"from": "gpt", "value": "4"}]
PARTS = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "2 + 2?"}]}, ANSWER]
CHOICES = {"text": ["3", "4"], "label": ["A", "B"]}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"question": [USER, ANSWER]}, {"question": "2 + 2?", "answer": "4"}),
        ({"question": SAID}, {"question": "2 + 2?", "answer": "4"}),
        ({"question": PARTS}, {"question": "2 + 2?", "answer": "4"}),
        ({"question": json.dumps([USER, ANSWER])}, {"question": "2 + 2?", "answer": "4"}),
        ({"question": [SYSTEM, USER], "answer": "4"}, {"question": "Answer by a number.\n2 + 2?", "answer": "4"}),
        # What a column says goes before what the talk says.
        ({"question": [USER, ANSWER], "answer": "four"}, {"question": "2 + 2?", "answer": "four"}),
        (
            {"question": [{"role": "user", "content": "<image> or <image>?"}], "answer": "a"},
            {"question": "<image 1> or <image 2>?", "answer": "a"},
        ),
        ({"answer": {"ground_truth": "4", "style": "rule"}}, {"answer": "4"}),
        ({"answer": {"value": "UK", "aliases": ["UK", "Britain"]}}, {"answers": ["UK", "Britain"]}),
        ({"answers": {"text": ["4", "four"], "answer_start": [0, 7]}}, {"answers": ["4", "four"]}),
        (
            {"answers": [{"answer": "4", "answer_id": 1}, {"answer": "4", "answer_id": 2}]},
            {"answers": ["4", "4"]},
        ),
        ({"options": CHOICES, "answer": "B"}, {"options": ["3", "4"], "answer": "4"}),
        # A label, and no number from 0.
        ({"options": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": 2}, {"options": ["x", "y"], "answer": "y"}),
        ({"options": {"A": "3", "B": "4", "C": None}, "answer": "B"}, {"options": ["3", "4"], "answer": "4"}),
        (
            {"question": {"stem": "2 + 2?", "choices": [{"label": "A", "text": "3"}, {"label": "B", "text": "4"}]},
             "answer": "B"},
            {"question": "2 + 2?", "options": ["3", "4"], "answer": "4"},
        ),
        ({"question": "[1]?", "answer": "{"}, {"question": "[1]?", "answer": "{"}),
    ],
)  # fmt: skip
def test_a_row_is_read_by_its_shape(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert unfolded(given) == read


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        ([USER, ANSWER, USER, ANSWER], "its talk has 2 questions and 2 answers; write a row for each question"),
        ([ANSWER], "its talk has 0 questions and 1 answer; write a row for each question"),
        ([USER, {"role": "tool", "content": "4"}], "a turn of it is by tool; give turns of system, user and assistant"),
        ([{"role": "user", "content": 4}], "a turn of it says 4; give a text, or a list of parts"),
        ([{"role": "user", "content": [{"type": "image", "image": {"path": "a.png"}}]}], "put it into a column image"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "a part of a turn of it is {'type': 'audio'}; give parts"),
    ],
)
def test_a_talk_that_is_no_question_is_named(talk: list[Any], reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        unfolded({"question": talk})


def test_columns_are_taken_by_shape_where_none_has_our_name() -> None:
    row = {"prompt": [USER], "reward_model": {"ground_truth": "4"}, "images": ["a.png"], "source": "x"}
    assert columns_by_shape([row], row, {}) == {"question": "prompt", "answer": "reward_model", "image": "images"}
    assert columns_by_shape([row], row, {"question": "prompt", "answer": "source", "image": "images"}) == {}
    row = {"question": "2 + 2?", "choices": CHOICES, "answerKey": "B", "id": "1"}
    assert columns_by_shape([row], row, {}) == {"options": "choices", "answer": "answerKey"}
    assert columns_by_shape([{"text": "a", "label": "b"}], ("text", "label"), {}) == {}


ROWS: dict[str, dict[str, Any]] = {
    "messages": {"images": ["a.png"], "messages": [USER, ANSWER]},
    "ground_truth": {"image": "a.png", "prompt": [USER], "reward_model": {"ground_truth": "4"}},
    "choices_by_label": {"question": "2 + 2?", "choices": CHOICES, "answerKey": "B"},
    "two_talks": {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
    "other_names": {"query": "2 + 2?", "target": {"ground_truth": "4"}, "photo": "a.png"},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_file_is_read_or_the_advice_is_followed_and_works(name: str, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps([ROWS[name]]))
    advised: list[str] = []
    if name in ("two_talks", "other_names"):
        with pytest.raises(ConfigurationError) as refused:
            DataFileTask(path)
        advised = re.findall(r"\w+=\w+", str(refused.value).partition("--columns ")[2])
    sample = DataFileTask(path, columns=mapping_of(advised))[0]
    assert (sample.question, *sample.answers) == ("2 + 2?", "4")
    assert (sample.image is None) == ("a.png" not in json.dumps(ROWS[name]))
