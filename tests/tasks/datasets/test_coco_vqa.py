"""VQA v2 and OK-VQA from the hub's columns and from the official question and annotation files."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.tasks.datasets.coco import OKVQA, Coco2014VQA, answer_texts
from experiment_core_utils.tasks.registry import load_task
from tests.tasks.datasets import layouts
from tests.tasks.datasets.layouts import BLUE, GREEN, RED, encoded, plain, stored, write_hub, write_json, write_picture


def ten(*texts: str) -> list[dict[str, Any]]:
    """Ten annotators' answers: the given ones, the last repeated."""
    given = [*texts, *[texts[-1]] * (10 - len(texts))]
    return [{"answer": text, "answer_confidence": "yes", "answer_id": n + 1} for n, text in enumerate(given)]


QUESTIONS = [
    {"image_id": 42, "question": "What color is it?", "question_id": 42001},
    {"image_id": 42, "question": "Is it day?", "question_id": 42000},
    {"image_id": 73, "question": "How many?", "question_id": 73000},
]
ANNOTATIONS = [  # not in the questions' order
    {"question_id": 73000, "image_id": 73, "answer_type": "number", "question_type": "how many", "answers": ten("2"),
     "multiple_choice_answer": "2"},
    {"question_id": 42000, "image_id": 42, "answer_type": "yes/no", "question_type": "is it", "answers": ten("yes"),
     "multiple_choice_answer": "yes"},
    {"question_id": 42001, "image_id": 42, "answer_type": "other", "question_type": "what color is",
     "answers": ten("crimson", "red"), "multiple_choice_answer": "red"},
]  # fmt: skip


def official(folder: Path, prefix: str = "v2_") -> Path:
    write_json(folder / f"{prefix}OpenEnded_mscoco_val2014_questions.json", {"questions": QUESTIONS})
    write_json(folder / f"{prefix}mscoco_val2014_annotations.json", {"annotations": ANNOTATIONS})
    turned = Image.Exif()
    turned[0x0112] = 8
    picture = encoded(Image.new("RGB", (6, 4), RED), "JPEG", exif=turned)
    write_picture(folder / "val2014" / "COCO_val2014_000000000042.jpg", picture)
    return folder


def hub(folder: Path) -> Path:
    by_id = {entry["question_id"]: entry for entry in ANNOTATIONS}
    colours = {42: RED, 73: GREEN}
    rows = [{**each, **by_id[each["question_id"]], "image": stored(plain(colours[int(str(each["image_id"]))]))}
            for each in QUESTIONS]  # fmt: skip
    return write_hub(folder, "validation", layouts.VQA_V2, rows)


@pytest.mark.parametrize("layout", [official, hub])
def test_vqa_v2(tmp_path: Path, layout: Any) -> None:
    task = load_task("coco_2014_vqa", "validation", data_dir=layout(tmp_path), cache_dir=tmp_path)
    assert (task.name, task.split, len(task)) == ("coco_2014_vqa", "validation", 3)
    assert [task.question_type(index) for index in range(3)] == ["other", "yes/no", "number"]
    sample = task[0]
    assert (sample.sample_id, sample.image_id, sample.question) == (0, "42", "What color is it?")
    assert sample.answers == ("crimson", *["red"] * 9)
    assert sample.question_type == "other"
    assert sample.metadata == {
        "question_id": "42001",
        "answer_type": "other",
        "question_type": "what color is",
        "multiple_choice_answer": "red",
    }
    assert (sample.options, sample.answer_index) == ((), None)
    assert task.prompt(sample) == " User: vqa2: What color is it? Assistant:"
    assert task[1].metadata["question_id"] == "42000" and task[1].answers == ("yes",) * 10


def test_official_pictures_are_turned_and_a_missing_one_is_named(tmp_path: Path) -> None:
    task = Coco2014VQA(data_dir=official(tmp_path))
    picture = task[0].image
    assert picture is not None and picture.size == (4, 6)
    with pytest.raises(
        SampleError,
        match=r"^coco_2014_vqa validation question 73000: picture COCO_val2014_000000000073.jpg is missing: there is "
        r"no file .*val2014/COCO_val2014_000000000073.jpg$",
    ):
        task[2]
    assert task.source["files"].startswith("v2_OpenEnded_mscoco_val2014_questions.json (sha256 ")


def test_a_question_without_annotation_or_file_is_a_configuration_error(tmp_path: Path) -> None:
    official(tmp_path)
    write_json(tmp_path / "v2_mscoco_val2014_annotations.json", {"annotations": ANNOTATIONS[:2]})
    with pytest.raises(ConfigurationError, match="has no answers to question 42001"):
        Coco2014VQA(data_dir=tmp_path)
    (tmp_path / "v2_mscoco_val2014_annotations.json").unlink()
    with pytest.raises(ConfigurationError, match=r"questions\.json but not v2_mscoco_val2014_annotations\.json"):
        Coco2014VQA(data_dir=tmp_path)


def test_ok_vqa_is_scored_by_raw_answers(tmp_path: Path) -> None:
    write_json(
        tmp_path / "OpenEnded_mscoco_val2014_questions.json",
        {"questions": [{"image_id": 7, "question": "What sport?", "question_id": 75}]},
    )
    answers = [{"answer_id": 1, "answer": "surf", "raw_answer": "surfing", "answer_confidence": "yes"}] * 10
    annotation = {"question_id": 75, "image_id": 7, "answer_type": "other", "question_type": "four", "answers": answers}
    write_json(tmp_path / "mscoco_val2014_annotations.json", {"annotations": [annotation]})
    write_picture(tmp_path / "val2014" / "COCO_val2014_000000000007.jpg", plain(BLUE))
    task = OKVQA(data_dir=tmp_path)
    assert task[0].answers == ("surfing",) * 10
    assert (task[0].image_id, task[0].metadata["question_id"], task.question_type(0)) == ("7", "75", "four")
    assert task.prompt(task[0]) == " User: okvqa: What sport? Assistant:"


def test_ok_vqa_from_the_hubs_split(tmp_path: Path) -> None:
    row = {
        "question_id": "2971475",
        "image": stored(plain(GREEN), "COCO_val2014_000000297147.jpg"),
        "question": "What sport can you use this for?",
        "answers": ["race", "race", "motocross"],
        "question_type": "one",
    }
    task = OKVQA(data_dir=write_hub(tmp_path, "val2014", layouts.OK_VQA, [row]), cache_dir=tmp_path)
    sample = task[0]
    assert sample.image is not None and sample.image.getpixel((0, 0)) == GREEN
    assert (sample.answers, sample.metadata["question_id"]) == (("race", "race", "motocross"), "2971475")
    assert (sample.image_id, sample.question_type) == ("COCO_val2014_000000297147", "one")


def test_answers_in_every_stored_form() -> None:
    assert answer_texts(["a", "b"]) == ("a", "b")
    assert answer_texts([{"answer": "a", "answer_id": 1}]) == ("a",)
    assert answer_texts({"answer": ["surf", "ski"], "raw_answer": ["surfing", "skiing"]}) == ("surfing", "skiing")
    with pytest.raises(SampleError, match="neither raw_answer nor answer"):
        answer_texts([{"text": "a"}])
