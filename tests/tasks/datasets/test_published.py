"""What the nine published datasets share: how they are found, the message where they are not, templates, errors."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.coco import OKVQA, Coco2014VQA, CocoCaption
from experiment_core_utils.tasks.datasets.doc_qa import DocVQA
from experiment_core_utils.tasks.datasets.hub_tables import HubDataset, read_hub
from experiment_core_utils.tasks.datasets.mmmu import MMMU
from experiment_core_utils.tasks.datasets.published import PublishedTask
from experiment_core_utils.tasks.datasets.science_qa import ScienceQAImages
from experiment_core_utils.tasks.datasets.st_qa import SceneTextQA
from experiment_core_utils.tasks.datasets.tally_qa import TallyQA
from experiment_core_utils.tasks.datasets.text_vqa import TextVQA
from experiment_core_utils.tasks.registry import get_metric_for_dataset, list_tasks, load_task
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import GREEN, RED, plain, stored, write_hub, write_json, write_picture

READERS = (Coco2014VQA, TextVQA, OKVQA, ScienceQAImages, SceneTextQA, DocVQA, TallyQA, CocoCaption, MMMU)
TOKENS_AND_METRIC = {
    "coco_2014_vqa": (16, "vqa_score"),
    "text_vqa": (64, "vqa_score"),
    "okvqa": (16, "vqa_score"),
    "science_qa_img": (16, "mc"),
    "st_qa": (32, "ansl_em"),
    "doc_qa": (32, "ansl_em"),
    "tally_qa": (16, "em"),
    "coco_caption": (64, "cider_score"),
    "mmmu": (128, "mmmu_score"),
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def text_vqa_rows() -> list[dict[str, object]]:
    return [
        {"image_id": "a", "question_id": 1, "question": "What?", "answers": ["x"] * 10, "image": stored(plain(RED))},
        {"image_id": "b", "question_id": 2, "question": "Who?", "answers": [], "image": stored(plain(GREEN))},
        {"image_id": "c", "question_id": 3, "question": "When?", "answers": ["z"], "image": None},
        {"image_id": "d", "question_id": 4, "question": "Why?", "answers": ["z"], "image": stored(plain(RED)[:40])},
    ]


def test_limits_and_metrics() -> None:
    assert {task.name: (task.max_new_tokens, task.metric) for task in READERS} == TOKENS_AND_METRIC
    assert set(TOKENS_AND_METRIC) <= set(list_tasks())
    for task in READERS:
        assert get_metric_for_dataset(task.name) == task.metric


@pytest.mark.parametrize("task", READERS, ids=lambda task: task.name)
def test_a_missing_dataset_says_at_once_what_would_provide_it(task: type[PublishedTask], tmp_path: Path) -> None:
    started = time.perf_counter()
    for split, found in task.splits.items():
        for folder in (None, tmp_path, tmp_path / "nowhere"):
            with pytest.raises(ConfigurationError) as caught:
                task(split, data_dir=folder, cache_dir=tmp_path)
            message = str(caught.value)
            assert "\n" not in message and message.startswith(task.name)
            if found.on_hub:
                assert f"run `hf download --repo-type dataset {task.hub.id} --revision main --local-dir DIR`" in message
            for name in found.files:
                assert name in message
            if folder is None and found.on_hub:
                assert "Couldn't reach" in message
    # No answer of the network is waited for.
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("task", READERS, ids=lambda task: task.name)
def test_unknown_and_unanswered_splits_name_those_with_answers(task: type[PublishedTask]) -> None:
    choices = ", ".join(task.splits)
    with pytest.raises(ConfigurationError, match=rf"{task.name} has no split 'minival': choose one of {choices}"):
        task("minival")
    for split in task.unanswered:
        with pytest.raises(ConfigurationError, match=rf"{task.name} {split} is published without answers.*{choices}"):
            task(split)


def test_rows_that_are_no_samples_fail_alone(tmp_path: Path) -> None:
    task = TextVQA(data_dir=write_hub(tmp_path, "validation", layouts.TEXT_VQA, text_vqa_rows()), cache_dir=tmp_path)
    assert len(task) == 4 and task[0].image is not None
    with pytest.raises(SampleError, match="^text_vqa validation question 2 has no reference answers$"):
        task[1]
    with pytest.raises(SampleError, match="^text_vqa validation question 3: the row has no picture$"):
        task[2]
    with pytest.raises(SampleError, match="^text_vqa validation question 4: picture d cannot be read: .+$"):
        task[3]
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"samples 0 to 3, not {index}"):
            task[index]
        with pytest.raises(IndexError, match=f"samples 0 to 3, not {index}"):
            task.question_type(index)


def test_a_template_replaces_molmos(tmp_path: Path) -> None:
    folder = write_hub(tmp_path, "validation", layouts.TEXT_VQA, text_vqa_rows())
    task = TextVQA(data_dir=folder, cache_dir=tmp_path, prompt_template="{question}\nOne word.")
    assert task.prompt(task[0]) == "What?\nOne word."
    with pytest.raises(ConfigurationError, match=r"\{query\}"):
        TextVQA(data_dir=folder, cache_dir=tmp_path, prompt_template="{query}")
    with pytest.raises(ConfigurationError, match=r"leaves out \{options\}"):
        ScienceQAImages(prompt_template="{question}")


def test_the_registry_hands_everything_on(tmp_path: Path) -> None:
    folder = write_hub(tmp_path, "validation", layouts.TEXT_VQA, text_vqa_rows())
    task = load_task("text_vqa", "validation", data_dir=str(folder), cache_dir=tmp_path, prompt_template="Q {question}")
    assert task.prompt(task[0]) == "Q What?"
    with pytest.raises(ConfigurationError, match="--revision v9"):
        load_task("text_vqa", "validation", cache_dir=tmp_path, revision="v9")
    with pytest.raises(ConfigurationError, match="reference_vqa is generated and takes no folder"):
        load_task("reference_vqa", "validation", data_dir=folder)


def test_a_revision_is_not_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="revision v1 is of the hub"):
        TextVQA(data_dir=tmp_path, revision="v1")


def test_another_layout_and_an_empty_one_are_named(tmp_path: Path) -> None:
    write_hub(tmp_path, "validation", layouts.OK_VQA, [{"question_id": "1"}])
    with pytest.raises(ConfigurationError, match=r"the rows have no image_id; they have answer_type, answers"):
        TextVQA(data_dir=tmp_path, cache_dir=tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "validation.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigurationError, match=r"split 'validation' in .*broken cannot be read") as caught:
        TextVQA(data_dir=tmp_path / "broken", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["validation.parquet", "validation/0000.parquet", "data/validation-00000-of-00001.parquet"]
)
def test_parquet_is_found_by_its_split(tmp_path: Path, name: str) -> None:
    first = write_hub(tmp_path / "made", "validation", layouts.TEXT_VQA, text_vqa_rows())
    copy = tmp_path / "copy" / name
    copy.parent.mkdir(parents=True)
    shutil.copy(first / "validation-00000-of-00001.parquet", copy)
    shutil.copy(copy, copy.parent.parent / "train-00000-of-00001.parquet")
    task = TextVQA(data_dir=tmp_path / "copy", cache_dir=tmp_path)
    assert len(task) == 4
    assert task.source["files"] == f"{name} ({copy.stat().st_size} bytes)"


def test_a_saved_dataset_opens(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(
        [{"ocr_tokens": [], **row} for row in text_vqa_rows()], features=layouts.TEXT_VQA, split="validation"
    )
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"validation": rows.select([1, 0])}).save_to_disk(tmp_path / "several")
    assert TextVQA(data_dir=tmp_path / "one")[0].metadata["question_id"] == "1"
    assert TextVQA(data_dir=tmp_path / "several")[1].metadata["question_id"] == "1"
    with pytest.raises(ConfigurationError, match="saved from split 'validation', and 'train' was requested"):
        TextVQA("train", data_dir=tmp_path / "one")
    with pytest.raises(ConfigurationError, match="saved without split 'train': it has validation"):
        TextVQA("train", data_dir=tmp_path / "several")


def cached_download(folder: Path) -> None:
    """What the library leaves in its cache after it has read text_vqa from the hub at `COMMIT`."""
    made = write_hub(folder / "made", "validation", layouts.TEXT_VQA, text_vqa_rows())
    rows = datasets.load_dataset(
        "parquet",
        data_files={"validation": str(made / "*.parquet")},
        split="validation",
        cache_dir=str(folder / "work"),
    )
    (arrow,) = (Path(file["filename"]) for file in rows.cache_files)
    cache = folder / "lmms-lab-encoder___textvqa" / "default" / "0.0.0" / COMMIT
    cache.mkdir(parents=True)
    shutil.copy(arrow, cache / "textvqa-validation.arrow")
    info = json.loads((arrow.parent / "dataset_info.json").read_text())
    info |= {"dataset_name": "textvqa", "config_name": "default"}
    info["splits"]["validation"]["dataset_name"] = "textvqa"
    write_json(cache / "dataset_info.json", info)


def test_the_hubs_cache_serves_without_a_network(tmp_path: Path) -> None:
    cached_download(tmp_path)
    task = TextVQA(cache_dir=tmp_path)
    sample = task[0]
    assert sample.question == "What?" and sample.image is not None and sample.image.getpixel((0, 0)) == RED
    assert {name: task.source[name] for name in ("read_from", "hub_id", "revision_asked", "revision")} == {
        "read_from": "hub",
        "hub_id": "lmms-lab-encoder/textvqa",
        "revision_asked": "main",
        "revision": COMMIT,
    }
    assert TextVQA(cache_dir=tmp_path, revision=COMMIT).source["revision"] == COMMIT


def test_a_cache_of_another_commit_is_refused(tmp_path: Path) -> None:
    cached_download(tmp_path)
    with pytest.raises(ConfigurationError, match=f"revision {'f' * 40} was requested, and the cache contains {COMMIT}"):
        read_hub(HubDataset("lmms-lab-encoder/textvqa", None, "f" * 40), "validation", tmp_path)
    with pytest.raises(ConfigurationError, match=r"text_vqa train cannot be read from the hub \(Unknown split"):
        TextVQA("train", cache_dir=tmp_path)


def test_official_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    path = tmp_path / "TextVQA_0.5.1_val.json"
    path.write_text('{"data": [')
    (tmp_path / "train_images").mkdir()
    with pytest.raises(ConfigurationError, match=r"TextVQA_0.5.1_val.json is not JSON"):
        TextVQA(data_dir=tmp_path)
    for content, message in (
        ({"rows": []}, "has no 'data'"),
        ({"data": {}}, "has no list of entries"),
        ({"data": [{"question": "What?"}]}, "entry 0 lacks one of question_id, image_id"),
        ({"data": []}, "text_vqa validation has no samples"),
    ):
        write_json(path, content)
        with pytest.raises(ConfigurationError, match=message):
            TextVQA(data_dir=tmp_path)
    (tmp_path / "train_images").rmdir()
    with pytest.raises(ConfigurationError, match=r"but no pictures; put them in train_images/ or"):
        TextVQA(data_dir=tmp_path)


def test_pictures_are_decoded_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_hub(tmp_path, "validation", layouts.TEXT_VQA, text_vqa_rows()[:1])

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr(Image, "open", fail)
    task = TextVQA(data_dir=folder, cache_dir=tmp_path)
    assert (len(task), task.question_type(0)) == (1, "all")
    with pytest.raises(SampleError, match="a picture was decoded"):
        task[0]


def test_nulls_are_failed_samples_and_never_the_text_none(tmp_path: Path) -> None:
    good = text_vqa_rows()[0]
    rows = [
        {**good, "answers": ["a", None]},
        {**good, "question": None},
        {**good, "question": "  "},
        {**good, "question_id": 5},
    ]
    write_hub(tmp_path, "validation", layouts.TEXT_VQA, rows)
    task = TextVQA(data_dir=tmp_path, cache_dir=tmp_path)
    for index, message in ((0, "None is among the answers"), (1, "question is None"), (2, "question is '  '")):
        with pytest.raises(SampleError, match=message):
            task[index]
    assert task[3].answers == ("x",) * 10


def test_a_null_answer_of_vqa_is_not_the_number_word_none(tmp_path: Path) -> None:
    answers = [{"answer": None, "answer_confidence": "yes", "answer_id": number} for number in range(10)]
    row = {
        "question_type": "what", "multiple_choice_answer": "x", "answers": answers, "image_id": 1,
        "answer_type": None, "question_id": 7, "question": "What?", "image": stored(plain(RED)),
    }  # fmt: skip
    write_hub(tmp_path, "validation", layouts.VQA_V2, [row])
    task = Coco2014VQA(data_dir=tmp_path, cache_dir=tmp_path)
    assert task.question_type(0) == "all"
    with pytest.raises(SampleError, match="question 7: None is among the answers"):
        task[0]


def test_official_files_with_odd_entries_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "val2014").mkdir()
    write_json(
        tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json",
        {"questions": [{"question_id": 1, "image_id": "abc", "question": "What?"}]},
    )
    write_json(
        tmp_path / "v2_mscoco_val2014_annotations.json",
        {"annotations": [{"question_id": 1, "answers": [], "answer_type": "other"}]},
    )
    with pytest.raises(ConfigurationError, match="are not the official files of that name .ValueError"):
        Coco2014VQA(data_dir=tmp_path, cache_dir=tmp_path)


def test_another_configuration_in_the_folder_is_not_taken_for_ours(tmp_path: Path) -> None:
    row = {"questionId": "1", "question": "What?", "image": stored(plain(RED)), "docId": 3, "answers": ["x"]}
    write_hub(tmp_path / "InfographicVQA", "validation", layouts.DOC_VQA, [row])
    with pytest.raises(ConfigurationError, match="doc_qa validation is not in"):
        DocVQA(data_dir=tmp_path, cache_dir=tmp_path)
    write_hub(tmp_path / "data", "validation", layouts.DOC_VQA, [{**row, "question": "Which?"}])
    assert DocVQA(data_dir=tmp_path, cache_dir=tmp_path)[0].question == "Which?"


def tally_entry(**changes: Any) -> dict[str, Any]:
    return {"question_id": 1, "image": "VG_100K/a.png", "question": "How many?", "answer": 2, **changes}


def official_tally(folder: Path, *entries: dict[str, Any]) -> TallyQA:
    write_picture(folder / "VG_100K" / "a.png", plain(RED))
    write_json(folder / "test.json", list(entries))
    return TallyQA("test", data_dir=folder)


DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]

# Case, what it changes in the entry, words of the reason of the failed sample.
HOSTILE_ENTRIES: list[tuple[str, dict[str, Any], str]] = [
    ("picture is an object", {"image": {"a": 1}}, "the picture's name is"),
    ("picture is a number", {"image": 7}, "the picture's name is 7, not a text"),
    ("picture is a list", {"image": ["VG_100K/a.png"]}, "the picture's name is .*not a text"),
    ("picture is nothing", {"image": None}, "without bytes and without a path"),
    ("picture is the folder", {"image": "."}, "not a regular file"),
    ("picture is empty text", {"image": ""}, "not a regular file"),
    ("name of 5,000 characters", {"image": "x" * 5000}, r"\(5000 characters\) is missing"),
    ("NUL in the name", {"image": "VG_100K/a\0.png"}, r"a\\x00.png contains a NUL"),
    ("line break in the name", {"image": "VG_100K/a\n.png"}, r"is missing.*a\\n.png"),
    ("surrogate in the name", {"image": "a\ud800.png"}, "the picture's name is .*not a text|is missing"),
    ("absolute path", {"image": "/proc/self/environ"}, "is not read: it is outside"),
    ("way out", {"image": "../../../../../../../../proc/self/environ"}, "is not read: it is outside"),
    ("pipe", {"image": "VG_100K/pipe.png"}, "not a regular file"),
    ("missing", {"image": "VG_100K/b.png"}, "is missing: there is no file"),
    ("question is a number", {"question": 3}, "the question is 3, not a text"),
    ("question is a list", {"question": ["What?"]}, "the question is .*not a text"),
    ("question is an object", {"question": {"text": "What?"}}, "the question is .*not a text"),
    ("question no tokenizer takes", {"question": "Wh\ud800t?"}, r"the question is 'Wh\\ud800t\?', not a text"),
    ("answer is an object", {"answer": {"a": 1}}, "the answer is .*neither a number nor a text"),
    ("answer is a list", {"answer": DEEP}, "the answer is .*neither a number nor a text"),
    ("answer no file takes", {"answer": "\udfff"}, "is among the answers or options"),
    ("id with a line break", {"question_id": "1\n2", "question": 3}, r"question 1\\n2: the question is 3"),
]


@pytest.mark.parametrize(("case", "changes", "words"), HOSTILE_ENTRIES, ids=[each[0] for each in HOSTILE_ENTRIES])
def test_a_hostile_entry_is_one_failed_sample(case: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    task = official_tally(tmp_path, tally_entry(**changes), tally_entry())
    os.mkfifo(tmp_path / "VG_100K" / "pipe.png")
    assert task.question_type(0) == "all"
    with pytest.raises(SampleError, match=words) as caught:
        task[0]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    str(caught.value).encode("utf-8")
    assert task[1].answers == ("2",)


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 10**9)


# Case, how the annotation file is made, words of the line.
HOSTILE_FILES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("pipe", os.mkfifo, "is a pipe or a device, not a regular file"),
    ("folder", lambda path: path.mkdir(), "is a folder, not a regular file"),
    ("device", lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device, not a regular file"),
    ("loop", lambda path: path.symlink_to(path.name), "tally_qa test is not in"),
    ("nested 100,000 deep", written(b"[" * 100_000), "nested too deeply"),
    ("nested objects", written(b'{"a":' * 100_000), "nested too deeply"),
    ("not UTF-8", written(b'[{"question": "\xff\xfe"}]'), r"is not JSON \('utf-8' codec"),
    ("NUL", written(b"\0" * 64), "is not JSON"),
    ("empty", written(b""), "is not JSON"),
    ("a number of 5,000 digits", written(b"[" + b"9" * 5000 + b"]"), r"is not JSON \(Exceeds the limit"),
    ("3 GB", sparse, "has 3000000000 bytes, and no official file has more than 2000000000"),
    ("no list", written(b"{}"), "has no list of entries"),
    ("a list of numbers", written(b"[1]"), "entry 0 lacks one of"),
    ("no entries", written(b"[]"), "tally_qa test has no samples"),
]


@pytest.mark.parametrize(("case", "make", "words"), HOSTILE_FILES, ids=[each[0] for each in HOSTILE_FILES])
def test_a_hostile_annotation_file_is_one_line(
    case: str, make: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "test.json")
    with pytest.raises(ConfigurationError, match=words) as caught:
        TallyQA("test", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_odd_types_in_official_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "val2014").mkdir()
    questions, answers = (f"{kind}_mscoco_val2014_{end}.json" for kind, end in
                          (("v2_OpenEnded", "questions"), ("v2", "annotations")))  # fmt: skip
    entry = {"question_id": 1, "image_id": 1, "question": "What?"}
    annotated = {"question_id": 1, "answers": [], "answer_type": "other"}
    for changes, more in (({"image_id": float("inf")}, {}), ({}, {"question_id": [1]}), ({"image_id": [DEEP]}, {})):
        write_json(tmp_path / questions, {"questions": [entry | changes]})
        write_json(tmp_path / answers, {"annotations": [annotated | more]})
        with pytest.raises(ConfigurationError, match="are not the official files of that name"):
            Coco2014VQA(data_dir=tmp_path)
    # A text for the list of answers: its letters are no answers.
    write_json(tmp_path / questions, {"questions": [entry]})
    write_json(tmp_path / answers, {"annotations": [annotated | {"answers": "red"}]})
    with pytest.raises(SampleError, match="the answers are 'red', neither texts nor records"):
        Coco2014VQA(data_dir=tmp_path)[0]


def test_stored_rows_of_any_kind_are_not_decoded(tmp_path: Path) -> None:
    """The library would open pictures in lists and other columns by itself, in any format that Pillow knows."""
    row = {**text_vqa_rows()[0], "more": [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": None}]}
    features = datasets.Features({**layouts.TEXT_VQA, "more": [datasets.Image()]})
    task = TextVQA(data_dir=write_hub(tmp_path, "validation", features, [row]), cache_dir=tmp_path)
    assert task[0].question == "What?"


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known picture format"),
        (b"", "no known picture format"),
        ({"bytes": None, "path": "/proc/self/environ"}, "is not read: it is outside"),
    ],
)
def test_hostile_pictures_in_parquet_fail_alone(picture: Any, words: str, tmp_path: Path) -> None:
    held = stored(picture) if isinstance(picture, bytes) else picture
    folder = write_hub(tmp_path, "validation", layouts.TEXT_VQA, [{**text_vqa_rows()[0], "image": held}])
    with pytest.raises(SampleError, match=f"question 1: .*{words}"):
        TextVQA(data_dir=folder, cache_dir=tmp_path)[0]


def test_columns_of_other_types_fail_alone(tmp_path: Path) -> None:
    number, text = layouts.NUMBER, layouts.TEXT
    features = datasets.Features(
        {"question_id": number, "image_id": text, "question": number, "image": text, "answers": text}
    )
    row = {"question_id": 1, "image_id": "a", "question": 5, "image": "a.png", "answers": "red"}
    task = TextVQA(data_dir=write_hub(tmp_path, "validation", features, [row]), cache_dir=tmp_path)
    with pytest.raises(SampleError, match="the answers are 'red', not a list"):
        task[0]


def test_pictures_that_a_hub_snapshot_links_to_are_read(tmp_path: Path) -> None:
    """The hub's cache keeps contents in `blobs`, and a snapshot is links to them."""
    snapshot = tmp_path / "datasets--lmms-lab--tally" / "snapshots" / COMMIT
    blobs = snapshot.parents[1] / "blobs"
    write_json(blobs / "1", [tally_entry(), tally_entry(image="VG_100K/out.png")])
    write_picture(blobs / "2", plain(GREEN))
    write_picture(tmp_path / "out.png", plain(RED))
    (snapshot / "VG_100K").mkdir(parents=True)
    (snapshot / "test.json").symlink_to("../../blobs/1")
    (snapshot / "VG_100K" / "a.png").symlink_to("../../../blobs/2")
    (snapshot / "VG_100K" / "out.png").symlink_to(tmp_path / "out.png")
    task = TallyQA("test", data_dir=snapshot)
    picture = task[0].image
    assert picture is not None and picture.getpixel((0, 0)) == GREEN
    with pytest.raises(SampleError, match="is not read: it is outside"):
        task[1]


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_saved_dataset_with_a_pipe_in_it_is_one_line(tmp_path: Path, name: str) -> None:
    rows = datasets.Dataset.from_list([{"ocr_tokens": [], **text_vqa_rows()[0]}], features=layouts.TEXT_VQA)
    rows.save_to_disk(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigurationError):
        TextVQA(data_dir=tmp_path, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["../other/data-00000-of-00001.arrow", "/etc/passwd", "sub/x.arrow", ".."])
def test_a_saved_dataset_reads_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    saved = tmp_path / "saved"
    rows = [{"ocr_tokens": [], **row} for row in text_vqa_rows()]
    datasets.Dataset.from_list(rows, features=layouts.TEXT_VQA, split="validation").save_to_disk(saved)
    (tmp_path / "other").mkdir()
    shutil.copy(saved / "data-00000-of-00001.arrow", tmp_path / "other")
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"][0]["filename"] = name
    write_json(saved / "state.json", state)
    with pytest.raises(ConfigurationError, match="names the file .* which is not beside it; save the dataset again"):
        TextVQA(data_dir=saved, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("state", ["{}", "[]", "[" * 100_000, '{"_data_files": [{"filename": 3}]}', "\0"])
def test_a_saved_dataset_whose_state_is_odd_is_one_line(tmp_path: Path, state: str) -> None:
    rows = datasets.Dataset.from_list([{"ocr_tokens": [], **text_vqa_rows()[0]}], features=layouts.TEXT_VQA)
    rows.save_to_disk(tmp_path)
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        TextVQA(data_dir=tmp_path, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
