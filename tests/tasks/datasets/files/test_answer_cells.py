"""Cells of answers and options as other programs write them: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.files.answer_cells import possible_firsts, with_whole_numbers
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask

GOOD = {"question": "Which?", "answer": "red"}
CITIES = ["Rome", "Oslo", "Bern", "Riga"]


def opened(folder: Path, *rows: dict[str, Any]) -> DataFileTask:
    path = folder / "my.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return DataFileTask(path)


def reason(task: DataFileTask, index: int) -> str:
    with pytest.raises(SampleError) as caught:
        task[index]
    assert "\n" not in str(caught.value)
    return str(caught.value).partition(": ")[2]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("{'red', 'crimson'}", ("red", "crimson")),
        ('{"crimson","red"}', ("crimson", "red")),
        ("frozenset({'red', 'crimson'})", ("red", "crimson")),
        ("dict_keys(['red', 'crimson'])", ("red", "crimson")),
        ("Index(['red', 'crimson'], dtype='object')", ("red", "crimson")),
        ("array(['red', 'crimson'], dtype=object)", ("red", "crimson")),
        # One answer.
        ("{x}", ("{x}",)),
        ("set(red)", ("set(red)",)),
    ],
)
def test_answers_are_a_list_in_any_notation(tmp_path: Path, cell: str, expected: tuple[str, ...]) -> None:
    assert opened(tmp_path, {"question": "Which?", "answers": cell})[0].answers == expected


@pytest.mark.parametrize(
    ("name", "cell", "words"),
    [
        ("answers", "0    red\n1    crimson\ndtype: object", "its answers is a Series of pandas as text, '0    red"),
        ("answer", "0    red\nName: answer, dtype: object", "its answer is a Series of pandas as text"),
        ("answers", "<StringArray>\n['red', 'crimson']\nLength: 2, dtype: string", "a Series of pandas as text"),
        ("answers", "{'text': ['red'], 'answer_start': [3]}", "its answers are "),
        ("answers", "{1, 2}", "its answers are '{1, 2}', not a list; write one in JSON"),
        ("answer", "{'red', 'crimson'}", "its answer is a list; call the column answers"),
        ("answers", "nan", "it has neither answer nor answers (nan is read as empty); give one of them"),
        ("answer", "NaN", "it has neither answer nor answers (NaN is read as empty); give one of them"),
        ("answers", float("nan"), "it has neither answer nor answers; give one of them"),
    ],
)
def test_what_is_no_list_of_answers_is_refused(tmp_path: Path, name: str, cell: Any, words: str) -> None:
    assert words in reason(opened(tmp_path, GOOD, {"question": "Which?", name: cell}), 1)


@pytest.mark.parametrize("as_text", [False, True])
def test_an_index_of_the_options_is_read_from_0_as_in_mmlu(tmp_path: Path, as_text: bool) -> None:
    base = {"question": "Which?", "options": CITIES}
    numbers = [2, 0, 3, 4]
    rows = [base | {"answer": str(number) if as_text else number} for number in numbers]
    numeric = {"question": "How many?", "options": ["0", "2", "1", "5"]}
    task = opened(tmp_path, *rows[:3], base | {"answer": "Riga"}, numeric | {"answer": 0}, numeric | {"answer": 3},
                  numeric | {"answer": 1})  # fmt: skip
    assert [task[index].answers for index in (0, 1, 2, 3, 4, 5)] == [
        ("Bern",), ("Rome",), ("Riga",), ("Riga",), ("0",), ("5",)
    ]  # fmt: skip
    assert "its answer 1 may be '2' or '1': by the file's other answers it is the number of an option" in reason(
        task, 6
    )
    assert task.remarks == ["answers that are numbers are read as those of options, from 0"]


def test_an_index_is_read_from_1_where_the_last_option_shows_it(tmp_path: Path) -> None:
    base = {"question": "Which?", "options": CITIES}
    task = opened(tmp_path, base | {"answer": 4}, base | {"answer": 1}, base | {"answer": 7})
    assert [task[index].answers for index in (0, 1)] == [("Riga",), ("Rome",)]
    assert "its answer is '7', which is neither one of its options nor a letter of one" in reason(task, 2)


def test_an_index_that_may_be_from_0_or_from_1_is_refused(tmp_path: Path) -> None:
    base = {"question": "Which?", "options": CITIES}
    with pytest.raises(ConfigurationError, match="its answer 2 may be 'Oslo' or 'Bern': .* write the option's letter"):
        opened(tmp_path, base | {"answer": 2}, base | {"answer": 1})
    # By letters nothing is ambiguous, and numbers among numbers are texts.
    assert opened(tmp_path, base | {"answer": "B"}, base | {"options": [3, 1, 2], "answer": 1})[1].answer_index == 1


def test_the_first_number_of_options() -> None:
    assert possible_firsts([]) == ()
    assert possible_firsts([("abc", "1"), ("abc", "b")]) == (0, 1)
    assert possible_firsts([("abc", "1"), ("abc", "0")]) == (0,)
    assert possible_firsts([("abc", "3"), ("abcd", "3")]) == (1,)
    # Two ways of counting in one file, and a row that no counting fits.
    assert possible_firsts([("abc", "3"), ("abc", "0")]) == ()
    assert possible_firsts([("abc", "9"), ("abc", "0")]) == (0,)
    # Options that are numbers show nothing.
    assert possible_firsts([(["4", "5"], "1")]) == ()


def test_whole_numbers_beside_empty_cells(tmp_path: Path) -> None:
    nan = float("nan")
    rows = [
        {"answer": 2.0, "D": "4.0"},
        {"answer": None, "D": ""},
        "torn",
        {"answer": -3.0, "D": None},
        {"answer": nan},
    ]
    found, changed = with_whole_numbers(rows, ["answer", "D", "E"])
    assert changed == ["answer", "D"]
    assert [row if isinstance(row, str) else row["answer"] for row in found][:4] == ["2", None, "torn", "-3"]
    assert [row.get("D") for row in found if not isinstance(row, str)] == ["4", "", None, None]
    # Fractions, and whole numbers that nothing is missing beside.
    for cells in ([2.0, 2.5, None], [2.0, 3.0], ["2.0", "two", ""], [None, None]):
        assert with_whole_numbers([{"answer": cell} for cell in cells], ["answer"])[1] == []
    base = {"question": "How many?", "A": 1, "B": 2}
    task = opened(tmp_path, base | {"C": 3.0, "answer": 3}, base | {"C": nan, "answer": 1})
    assert (task[0].options, task[0].answers, task[1].options) == (("1", "2", "3"), ("3",), ("1", "2"))
    assert task.remarks == ["C: 2.0 is read as 2, since pandas writes whole numbers so beside empty cells"]
    task = opened(tmp_path, {"question": "How many?", "answer": 3.0}, {"question": "How many?", "answer": nan})
    assert task[0].answers == ("3",) and "neither answer nor" in reason(task, 1)
