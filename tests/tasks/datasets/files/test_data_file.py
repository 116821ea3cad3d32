"""One's own questions in a file: the three forms, broken rows, pictures, options, and what is refused at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value
from datasets import Image as Picture

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.files import REPOSITORY
from experiment_core_utils.tasks.datasets.files.data_file import DataFileTask
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import load_data_file
from tests.tasks.datasets.layouts import GREEN, RED, plain, stored, write_picture

ROWS: list[dict[str, Any]] = [
    {"image": "photos/red.png", "question": "What colour?", "answer": "red", "type": "colour"},
    {"image": None, "question": "Two and two?", "answers": ["4", "four"], "type": "sum"},
    {"image": "photos/green.png", "question": "Is it red?", "answer": "no"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_picture(tmp_path / "photos" / "red.png", plain(RED))
    write_picture(tmp_path / "photos" / "green.png", plain(GREEN))
    return tmp_path


def write_jsonl(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def write_csv(path: Path) -> Path:
    path.write_text(
        "image,question,answer,answers,type\n"
        "photos/red.png,What colour?,red,,colour\n"
        ',Two and two?,,"[""4"", ""four""]",sum\n'
        "\n"
        "photos/green.png,Is it red?,no,,\n"
    )
    return path


def write_parquet(path: Path) -> Path:
    text = Value("string")
    features = Features({"image": text, "question": text, "answer": text, "answers": [text], "type": text})
    rows = [{name: row.get(name) for name in features} for row in ROWS]
    Dataset.from_list(rows, features=features).to_parquet(str(path))
    return path


def refusal(path: Path, metric: str | None = None, **given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_data_file(path, metric, cache_dir=path.parent / "cache", **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def reason(task: Task, index: int) -> str:
    with pytest.raises(SampleError) as caught:
        task[index]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "write", "second"),
    [
        ("jsonl", lambda path: write_jsonl(path, *ROWS), "line 2"),
        ("csv", lambda path: write_csv(path), "line 3"),
        ("parquet", lambda path: write_parquet(path), "row 2"),
    ],
)
def test_the_three_forms_give_the_same_samples(
    folder: Path, form: str, write: Callable[[Path], Path], second: str
) -> None:
    path = folder / f"my questions.{form}"
    write(path)
    task = load_data_file(path, cache_dir=folder / "cache")
    assert (task.name, task.split, task.metric, len(task)) == ("my_questions", "all", "em_lenient", 3)
    assert [task.question_type(index) for index in range(3)] == ["colour", "sum", "all"]
    red, text, green = (task[index] for index in range(3))
    assert red.image is not None and red.image.getpixel((0, 0)) == RED
    assert green.image is not None and green.image.getpixel((0, 0)) == GREEN
    assert text.image is None
    assert [each.answers for each in (red, text, green)] == [("red",), ("4", "four"), ("no",)]
    assert [each.image_id for each in (red, green)] == ["photos/red.png", "photos/green.png"]
    assert task.prompt(text) == " User: vqa2: Two and two? Assistant:"
    assert text.metadata == {"row": f"my questions.{form} {second}"}
    assert task.source["file"] == path.name and len(task.source["sha256"]) == 64


def test_a_parquet_file_is_read_without_a_word_of_the_library(folder: Path) -> None:
    write_parquet(folder / "my.parquet")
    code = (
        "import datasets, sys; from pathlib import Path;"
        "from experiment_core_utils.tasks.registry import load_data_file;"
        "load_data_file(Path('my.parquet'), cache_dir=Path('cache')); sys.exit(datasets.are_progress_bars_disabled())"
    )
    # The working directory is that of the file; the bars of other readings are as they were.
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True
    )
    assert (run.returncode, run.stderr, run.stdout) == (0, b"", b"")


def test_a_parquet_file_needs_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(folder / "my.parquet")
    monkeypatch.delitem(sys.modules, "experiment_core_utils.tasks.datasets.hub_tables", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "the package datasets is not installed; run: pip install datasets" in refusal(path)


def test_pictures_within_a_parquet_file(folder: Path) -> None:
    features = Features({"image": Picture(), "question": Value("string"), "answer": Value("int64")})
    rows = [{"image": stored(plain(RED)), "question": "How many?", "answer": 3}]
    Dataset.from_list(rows, features=features).to_parquet(str(folder / "counts.parquet"))
    sample = load_data_file(folder / "counts.parquet", cache_dir=folder / "cache")[0]
    assert sample.image is not None and sample.image.getpixel((0, 0)) == RED
    assert sample.answers == ("3",)


def test_a_broken_row_fails_alone_and_names_its_line(folder: Path) -> None:
    good = ROWS[0]
    path = write_jsonl(
        folder / "my.jsonl",
        good, "", '{"question": "torn', "[1, 2]", {"answer": "red"}, {"question": "What?"},
        good | {"answers": ["red"]}, good | {"image": "photos/blue.png"}, good | {"image": "../my.jsonl"},
        good | {"answer": 2.5}, good | {"answer": ["red"]}, good | {"question": 7}, good | {"image": 7},
        good | {"answer": None, "answers": "[]"}, good | {"image": "red.png"},
        good | {"image": "photos/red.png\0"},
    )  # fmt: skip
    (folder.parent / "my.jsonl").write_text("outside")
    task = load_data_file(path)
    assert len(task) == 15 and task[0].answers == ("red",)
    assert reason(task, 1).startswith("my.jsonl line 3: it is not JSON (")
    assert reason(task, 2) == "my.jsonl line 4: it is [1, 2], not an object"
    assert reason(task, 3) == "my.jsonl line 5: it has no question; its columns are answer"
    assert reason(task, 4) == "my.jsonl line 6: it has neither answer nor answers; give one of them"
    assert reason(task, 5) == "my.jsonl line 7: it has both answer and answers; give one of them"
    assert reason(task, 6).startswith("my.jsonl line 8: picture photos/blue.png is missing")
    assert reason(task, 7).startswith("my.jsonl line 9: picture ../my.jsonl is not read: it is outside")
    assert "2.5 is among the answers or options, which must be texts" in reason(task, 8)
    assert reason(task, 9) == "my.jsonl line 11: its answer is a list; call the column answers"
    assert reason(task, 10) == "my.jsonl line 12: the question is 7, not a text"
    assert reason(task, 11) == "my.jsonl line 13: its image is 7, neither a path nor bytes"
    assert reason(task, 12) == "my.jsonl line 14: its answers are an empty list; give at least one"
    # Its name alone does not find it in a folder below.
    assert reason(task, 13).startswith("my.jsonl line 15: picture red.png is missing")
    assert "path photos/red.png\\x00 contains a NUL" in reason(task, 14)
    assert task.source
    with pytest.raises(IndexError, match="samples 0 to 14, not 15"):
        task[15]


def test_a_broken_line_of_csv(folder: Path) -> None:
    (folder / "my.csv").write_bytes(
        b'question,answer\nWhat?,a\nWho,b,c\n"two\nlines","c"\ncaf\xe9?,d\nlast?,e\n"open,f\n'
    )
    task = load_data_file(folder / "my.csv")
    assert task[0].question == "What?" and task[2].question == "two\nlines" and task[4].answers == ("e",)
    assert reason(task, 1) == "my.csv line 3: it has 3 cells, and the first line has 2"
    assert reason(task, 3) == (
        "my.csv line 6: its question has a byte that is not UTF-8 (0xe9), as of Windows-1252 or Latin-1; save the file "
        "as UTF-8"
    )
    assert reason(task, 5) == "my.csv line 8: it is not CSV (unexpected end of data)"
    (folder / "two.csv").write_text("question,question,answer\na,b,c\n")
    assert "two columns of one name in line 1; rename one" in refusal(folder / "two.csv")


def test_every_row_is_checked_by_the_headers_of_its_pictures(folder: Path) -> None:
    """The content of a picture is not decoded: a torn one has a header, and fails where it is requested."""
    whole = (folder / "photos" / "red.png").read_bytes()
    (folder / "torn.png").write_bytes(whole[:45])
    (folder / "text.png").write_text("no picture")
    good = ROWS[0]
    (folder.parent / "outside.png").write_bytes(whole)
    pictures = ["photos/red.png", "text.png", None, "gone.png", "torn.png", "../outside.png"]
    rows = [*[good | {"image": each} for each in pictures], {"question": "What?"}, "{torn", ROWS[1]]
    task = load_data_file(write_jsonl(folder / "my.jsonl", *rows))
    assert isinstance(task, DataFileTask)
    found = list(task.faults(range(len(task))))
    assert [each.split(": ")[0].removeprefix("my.jsonl line ") for each in found] == ["2", "4", "6", "7", "8"]
    words = ("no known picture format", "gone.png is missing", "it is outside", "neither answer nor", "not JSON")
    assert [each in fault for each, fault in zip(words, found, strict=True)] == 5 * [True]
    # The same as the failed samples say, in the order that is asked for.
    assert found[:2] == [reason(task, 1), reason(task, 3)]
    assert list(task.faults([3, 0, 1])) == found[1::-1]
    assert "torn.png cannot be read" in reason(task, 4)


def test_the_answer_of_a_choice_is_an_option_or_its_letter(folder: Path) -> None:
    base = {"question": "Which?", "options": ["red", "green"]}
    path = write_jsonl(
        folder / "choices.jsonl",
        base | {"answer": "green"}, base | {"answer": "A"}, base | {"options": "['B', 'A']", "answer": "A"},
        base | {"options": [1, 2], "answer": 2}, base | {"answer": "C"}, base | {"options": "red", "answer": "red"},
        base | {"answers": ["red", "green"]}, base | {"options": ["red", "red"], "answer": "red"},
    )  # fmt: skip
    task = load_data_file(path)
    assert task.metric == "mc"
    found = [(sample.answer_index, sample.answers) for sample in map(task.__getitem__, range(4))]
    assert found == [(1, ("green",)), (0, ("red",)), (1, ("A",)), (1, ("2",))]
    assert task.prompt(task[0]) == " User: a_okvqa_mc: Which?\nA: red\nB: green\n Assistant:"
    assert "its answer is 'C', which is neither one of its options nor a letter of one" in reason(task, 4)
    assert "its options are 'red', not a list" in reason(task, 5)
    assert "not the one right answer" in reason(task, 6) and "not the one right answer" in reason(task, 7)


def test_a_template_has_to_show_the_options(folder: Path) -> None:
    path = write_jsonl(folder / "choices.jsonl", {"question": "Q", "options": ["a", "b"], "answer": "a"})
    assert "leaves out {options}" in refusal(path, prompt_template="{question}")
    task = load_data_file(path, prompt_template="{question} {options}!")
    assert task.prompt(task[0]) == "Q A: a\nB: b\n!"


def test_further_columns_are_kept_where_they_are_texts_or_numbers(folder: Path) -> None:
    row = ROWS[0] | {"source": "mail", "year": 1999, "nested": {"a": 1}, "none": None}
    task = load_data_file(write_jsonl(folder / "my.jsonl", row))
    assert task[0].metadata == {"source": "mail", "year": 1999, "row": "my.jsonl line 1"}


def test_pictures_may_lie_in_another_folder(folder: Path) -> None:
    (folder / "lists").mkdir()
    path = write_jsonl(folder / "lists" / "my.jsonl", ROWS[0])
    assert "none can be used: my.jsonl line 1: picture photos/red.png is missing" in refusal(path)
    assert load_data_file(path, data_dir=folder)[0].image is not None
    assert "--data_dir nowhere is not a folder" in refusal(path, data_dir=Path("nowhere"))


def test_a_file_that_is_of_no_use_is_refused(folder: Path) -> None:
    assert "No such file" in refusal(folder / "nothing.jsonl")
    assert "a folder, not a regular file" in refusal(folder)
    (folder / "my.txt").write_text("What?")
    assert "give a .jsonl, .json, .csv, .tsv or .parquet file" in refusal(folder / "my.txt")
    for name in ("empty.jsonl", "empty.csv"):
        (folder / name).write_text("")
        assert "has 0 rows and none can be used" in refusal(folder / name)
    for mark, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")):
        (folder / "my.csv").write_text(f'"question"{mark} answer\nWhat?{mark}red\n')
        assert f"my.csv separates its columns by {name} (" in refusal(folder / "my.csv")
        assert refusal(folder / "my.csv").endswith("and is read with commas; save it with commas")
    (folder / "one.csv").write_text("Frage\nWhat?\n")
    assert "one.csv line 2: it has no question; its columns are Frage" in refusal(folder / "one.csv")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        (folder / "my.csv").write_bytes("question,answer\nWhat?,red\n".encode(encoding))
        assert "my.csv has zero bytes or the mark of UTF-16, and is read as UTF-8; save it" in refusal(
            folder / "my.csv"
        )
    (folder / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read as Parquet" in refusal(folder / "torn.parquet")
    assert "would be called like the task text_vqa; rename" in refusal(write_jsonl(folder / "text-vqa.jsonl", ROWS[1]))


def test_a_metric_has_to_be_able_to_score_the_rows(folder: Path) -> None:
    one, choice = ROWS[0], {"question": "Which?", "options": ["B", "A"], "answer": "B"}
    path = write_jsonl(folder / "my.jsonl", one)
    torn = write_jsonl(folder / "torn.jsonl", one | {"answer": "Answer: red"})
    assert "--metric em gives even the right answer 'Answer: red' of" in (refused := refusal(torn, "em"))
    assert refused.endswith("0; choose one that gives it its best, such as vqa_score or anls")
    assert "--metric mc cannot score the rows" in refusal(path, "mc")
    assert "unknown metric 'bleu'" in refusal(path, "bleu")
    assert load_data_file(path, "cider_score").metric == "cider_score"
    assert load_data_file(write_jsonl(folder / "ten.jsonl", {"question": "Q", "answers": ["a"] * 10}), "vqa_score")
    assert load_data_file(write_jsonl(folder / "choices.jsonl", choice)).metric == "mc"
    both = write_jsonl(folder / "both.jsonl", one, choice)
    assert "rows with options and rows without" in refusal(both)
    assert [load_data_file(each, has_chat_template=True).metric for each in (path, folder / "choices.jsonl")] == [
        "relaxed",
        "mc",
    ]
    assert load_data_file(path, "em", has_chat_template=True).metric == "em"
    assert load_data_file(path).metric == "em_lenient"
    assert load_data_file(both, "relaxed").metric == "relaxed"
    assert load_data_file(both, "mmmu_score").metric == "mmmu_score"


def test_a_copy_elsewhere_is_the_same_data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = write_jsonl(folder / "my.jsonl", ROWS[1])
    second = write_jsonl(tmp_path_factory.mktemp("copy") / "my.jsonl", ROWS[1])
    assert DataFileTask(first).source == DataFileTask(second).source
    assert DataFileTask(write_jsonl(folder / "my.jsonl", ROWS[1], ROWS[1])).source != DataFileTask(second).source
