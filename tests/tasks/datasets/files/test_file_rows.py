"""Forms of data files, folders and cells of pictures: what is read, and what is named as the cause of a refusal."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, disable_progress_bars
from datasets import Image as Picture
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, HubUnreachable, SampleError
from experiment_core_utils.tasks.interface import Task
from experiment_core_utils.tasks.registry import load_data_file
from tests.tasks.datasets.layouts import BLUE, RED, plain, stored, write_picture

disable_progress_bars()
QUESTION = {"question": "Which?", "answer": "red"}


def encoded(colour: tuple[int, int, int], form: str = "PNG", num_more: int = 0) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (20, 20), colour).save(stream, form, lossless=True)
    return base64.b64encode(stream.getvalue() + bytes(num_more)).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_picture(tmp_path / "a.png", plain(RED))
    write_picture(tmp_path / "b b.png", plain(BLUE))
    return tmp_path


def refusal(path: Path, **given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_data_file(path, cache_dir=path.parent / "cache", **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def colours(task: Task, index: int) -> list[Any]:
    return [each.getpixel((0, 0)) for each in task[index].images]


@pytest.mark.parametrize(
    "content",
    [
        [QUESTION, QUESTION],
        {"version": 2, "data": [QUESTION, QUESTION]},
        {"images": [{"id": 1}], "annotations": [QUESTION, QUESTION]},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_a_list_of_objects(folder: Path, content: Any, indent: int | None) -> None:
    (folder / "my.json").write_text(json.dumps(content, indent=indent))
    task = load_data_file(folder / "my.json")
    assert len(task) == 2 and task[1].metadata == {"row": "my.json row 2"}


def test_json_with_an_object_in_each_line(folder: Path) -> None:
    (folder / "my.JSON").write_text(f"{json.dumps(QUESTION)}\n{json.dumps(QUESTION)}\n")
    assert load_data_file(folder / "my.JSON")[1].metadata == {"row": "my.JSON line 2"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("my.json", '{"question": ["q"], "answer": ["a"]}', "written by column (question, answer), not by row; with"),
        ("my.json", '{"question": {"0": "q"}, "answer": {"0": "a"}}', "written by column"),
        ("my.json", '{"a": [{}], "b": [{}]}', "several lists of objects (a, b); save the one with the questions alone"),
        ("my.json", '{"question": "q", "answer": "a"}', "an object without a list of objects (it has question"),
        ("my.json", "7", "is 7; give a list of objects"),
        ("my.json", '{"torn', "is not JSON ("),
        ("my.jsonl", '[{"question": "q",\n "answer": "a"}]', "one list of JSON, not an object in each line"),
        ("my.csv", "Image;Question;Answer\na;b;c\n", "separates its columns by semicolons (Image;Question;Answer)"),
        ("my.csv", "picture^query^label\na^b^c\n", "separates its columns by carets"),
        ("my.csv", "img:prompt:gt\na:b:c\n", "separates its columns by colons"),
        ("my.csv", "image\tquestion\tanswer\na\tb\tc\n", "separates its columns by tabs"),
        ("my.csv", "images|prompt|label\na|b|c\n", "separates its columns by vertical bars"),
        ("my.csv", "Bild;Frage;Antwort\na;b;c\n", "separates its columns by semicolons (Bild;Frage;Antwort)"),
        ("my.csv", "Frage, lang;Bild;Antwort\na;b;c\n", "separates its columns by semicolons"),
        ("my.csv", "Frage:Antwort\na:b\n", "separates its columns by colons"),
        ("my.csv", "Frage: kurz: jetzt,Antwort\na,b\n", "it has no question; its columns are Frage: kurz: jetzt, Antw"),
        ("my.tsv", "Bild,Frage\na,b\n", "by commas (Bild,Frage), and is read with tabs"),
        ("my.tsv", "image,question,answer\na,b,c\n", "by commas (image,question,answer), and is read with tabs"),
        ("my.csv", "sep=;\nimage;question;answer\na;b;c\n", "begins with the line sep=;, which is for Excel alone"),
        ("my.csv", "SEP=,\nimage,question,answer\na,b,c\n", "begins with the line SEP=,, which is for Excel alone"),
        ("my.csv", ",,\na.png,b,c\n", "has no name for columns 1, 2, 3 in line 1; write the names"),
        ("my.csv", "image,,\na.png,b,c\n", "has no name for columns 2, 3 in line 1"),
        ("my.csv", ",question,answer\na.png,b,c\n", "a column without a name would not be read; give it one"),
        ("my.csv", "a.png,Which?,red\nb.png,Which?,blue\n", "begins with a row (a.png, Which?, red)"),
        ("my.csv", "PK\x03\x04sheet", "is a spreadsheet or an archive by its content, not text; save it as CSV UTF-8"),
        ("my.xlsx", "PK\x03\x04sheet", "is a spreadsheet; save it as CSV UTF-8 with commas"),
        ("my.ods", "PK\x03\x04sheet", "is a spreadsheet; save it as CSV UTF-8 with commas"),
        ("my.jsonl.gz", "\x1f", "is an archive; unpack it"),
        ("my.arrow", "ARROW1", "save it as Parquet"),
    ],
)  # fmt: skip
def test_the_cause_of_a_refusal_is_named(folder: Path, name: str, content: str, words: str) -> None:
    (folder / name).write_text(content)
    assert words in refusal(folder / name)


@pytest.mark.parametrize("name", ["my.csv", "my.tsv", "my.json", "my.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named(folder: Path, name: str, encoding: str) -> None:
    (folder / name).write_bytes(json.dumps([QUESTION]).encode(encoding))
    assert f"{name} has zero bytes or the mark of UTF-16, and is read as UTF-8; save it as UTF-8" in refusal(
        folder / name
    )


def test_lines_before_the_names_of_the_columns_may_be_empty(folder: Path) -> None:
    (folder / "my.csv").write_text("\ufeff\n\nquestion,answer\nWhich?,red\n", encoding="utf-8")
    assert load_data_file(folder / "my.csv")[0].metadata == {"row": "my.csv line 4"}


def test_a_tsv_file_in_the_layout_of_vlmevalkit(folder: Path) -> None:
    """A picture in base64 is longer than Python's module takes in a cell; other rows name it by its row's index."""
    large = encoded(RED, num_more=150_000)
    lines = [
        "index\timage\thint\tquestion\tA\tB\tC\tD\tanswer\tcategory\tl2-category",
        f"3\t{large}\tLook.\tWhich?\tred\tblue\t\t\tA\tcolour\tfine",
        "7\t3\t\tWhich not?\tred\tblue\tgreen\t\tC\tcolour\tfine",
        "8\t7\t\tWhich?\tred\tblue\t\t\tA\tcolour\tfine",
    ]
    (folder / "my.tsv").write_text("\n".join(lines))
    task = load_data_file(folder / "my.tsv")
    first, second = task[0], task[1]
    assert (first.question, first.options, first.answers) == ("Look.\nWhich?", ("red", "blue"), ("red",))
    assert (second.options, second.answer_index) == (("red", "blue", "green"), 2)
    assert first.metadata["category"] == "colour" and first.metadata["l2-category"] == "fine"
    assert [colours(task, index) for index in (0, 1)] == [[RED], [RED]]
    # They share a picture, and its row's name.
    assert first.image_id == second.image_id == "my.tsv line 2"
    with pytest.raises(SampleError, match="my.tsv line 4: picture 3 is missing"):
        task[2]
    (folder / "paths.tsv").write_text("index\timage_path\tquestion\tanswer\n0\ta.png\tWhich?\tred\n")
    assert "give --columns image=image_path" in refusal(folder / "paths.tsv")


def test_a_picture_is_a_path_a_uri_or_base64(folder: Path) -> None:
    red = encoded(RED)
    cells = [
        "a.png", f"data:image/png;base64,{red}", red, f"{red[:70]}\n{red[70:]}", (folder / "a.png").as_uri(),
        f"DATA:image/PNG;BASE64,{red}", {"bytes": red, "path": "x.png"}, {"path": "a.png"}, encoded(RED, "WEBP"),
        encoded(RED, "GIF"), encoded(RED, "BMP"),
    ]  # fmt: skip
    rows = [QUESTION | {"image": cell} for cell in cells]
    rows.append(QUESTION | {"image": (folder / "b b.png").as_uri()})
    (folder / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_data_file(folder / "my.jsonl")
    assert [colours(task, index) for index in range(len(cells))] == len(cells) * [[RED]]
    assert colours(task, len(cells)) == [BLUE]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            "http://example.org/a.png",
            "its image is the address http://example.org/a.png, and nothing is downloaded while",
        ),
        ("https://example.org/a", "nothing is downloaded while measuring: download the pictures and give their paths"),
        ("s3://bucket/a.png", "its image is the address s3://bucket/a.png"),
        ("data:image/svg+xml,<svg>", "which is not in base64; write it in base64"),
        ("data:image/png;base64,@@@", "its image is base64 that cannot be decoded ("),
        ("file:///etc/passwd", "picture /etc/passwd is not read: it is outside"),
        ({"bytes": 7}, "the picture's bytes are 7, not bytes"),
        (["a.png", 7], "its image is 7, neither a path nor bytes"),
        (["a.png", None], "a list with something else than pictures in it"),
    ],
)
def test_a_cell_that_is_no_picture_is_a_failed_sample(folder: Path, cell: Any, words: str) -> None:
    (folder / "my.jsonl").write_text(f"{json.dumps(QUESTION | {'image': cell})}\n{json.dumps(QUESTION)}")
    task = load_data_file(folder / "my.jsonl")
    with pytest.raises(SampleError) as caught:
        task[0]
    assert words in str(caught.value) and str(caught.value).startswith("my.jsonl line 1: ")


FEATURES = Features({"image": Picture(), "question": Value("string"), "answer": ClassLabel(names=["blue", "red"])})
ROWS = [{"image": stored(plain(RED)), "question": "Which?", "answer": 1}, {"image": None, "question": "W", "answer": 0}]


def test_a_saved_dataset(folder: Path) -> None:
    table = Dataset.from_list(ROWS, features=FEATURES)
    table.save_to_disk(str(folder / "one"))
    task = load_data_file(folder / "one")
    assert (task.name, task.split, task.source["read_from"]) == ("one", "all", "saved dataset")
    # Numbers of classes are their names.
    assert colours(task, 0) == [RED] and [task[index].answers for index in range(2)] == [("red",), ("blue",)]
    assert refusal(folder / "one", split="test").endswith("one was saved without splits; drop --split test")
    DatasetDict({"train": table, "validation": table}).save_to_disk(str(folder / "two"))
    assert refusal(folder / "two").endswith("two has the splits train, validation; give one by --split")
    assert "and not valid (did you mean validation?)" in refusal(folder / "two", split="valid")
    assert load_data_file(folder / "two", split="validation").split == "validation"
    assert "--dataset_revision cannot act" in refusal(folder / "two", split="train", revision="main")


def test_columns_of_a_table_on_disk_are_checked_like_those_of_a_text(folder: Path) -> None:
    features = Features({"picture": Picture(), "question": Value("string"), "answer": Value("string")})
    row = {"picture": stored(plain(RED)), "question": "Which?", "answer": "red"}
    Dataset.from_list([row], features=features).to_parquet(str(folder / "my.parquet"))
    assert "give --columns image=picture" in refusal(folder / "my.parquet")
    task = load_data_file(folder / "my.parquet", cache_dir=folder / "cache", columns={"image": "picture"})
    assert colours(task, 0) == [RED]
    several = Features({"image": [Picture()], "question": Value("string"), "answer": Value("string")})
    row = {"image": [stored(plain(RED)), stored(plain(BLUE))], "question": "Which?", "answer": "red"}
    Dataset.from_list([row], features=several).save_to_disk(str(folder / "several"))
    assert colours(load_data_file(folder / "several"), 0) == [RED, BLUE]


def test_a_folder_of_pictures_with_metadata(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,question,answer\na.png,Which?,red\nb b.png,Which?,blue\n")
    task = load_data_file(folder)
    assert [colours(task, index) for index in range(2)] == [[RED], [BLUE]]
    (folder / "metadata.jsonl").write_text("{}")
    assert refusal(folder).endswith("has metadata.jsonl, metadata.csv; keep one")
    split = folder / "splits" / "train"
    write_picture(split / "c.png", plain(BLUE))
    (split / "metadata.jsonl").write_text(json.dumps(QUESTION | {"file_names": ["c.png", "c.png"]}))
    assert refusal(folder / "splits").endswith("has the splits train; give one by --split")
    assert colours(load_data_file(folder / "splits", split="train"), 0) == [BLUE, BLUE]
    assert "is a folder, not a regular file, and neither" in refusal(
        split.parent.parent / "splits" / "..", split="none"
    )


def test_a_folder_in_the_hubs_layout_needs_a_split(folder: Path) -> None:
    (folder / "set" / "data").mkdir(parents=True)
    table = Dataset.from_list(ROWS, features=FEATURES)
    table.to_parquet(str(folder / "set" / "data" / "test-00000-of-00001.parquet"))
    assert "give it by --split" in refusal(folder / "set")
    assert "has no files of split train; give another --split" in refusal(folder / "set", split="train")
    assert colours(load_data_file(folder / "set", split="test", cache_dir=folder / "cache"), 0) == [RED]


def test_a_dataset_of_the_hub_has_a_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    message = refusal(Path("owner/name"))
    assert message.endswith("and as a dataset of the hub it needs --split, such as --split validation")
    with pytest.raises(HubUnreachable, match="no such file or folder, and as a dataset of the hub it cannot be read"):
        load_data_file(Path("owner/name:config"), split="test", cache_dir=folder / "cache")
    assert "owner/my.jsonl: No such file" in refusal(Path("owner/my.jsonl"))
