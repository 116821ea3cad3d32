"""Small datasets in the published layouts: parquet files with the hub's columns, and official files with pictures."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from datasets import Image as Picture
from PIL import Image

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)

TEXT, NUMBER = Value("string"), Value("int64")

VQA_V2 = Features(
    {
        "question_type": TEXT,
        "multiple_choice_answer": TEXT,
        "answers": [{"answer": TEXT, "answer_confidence": TEXT, "answer_id": NUMBER}],
        "image_id": NUMBER,
        "answer_type": TEXT,
        "question_id": NUMBER,
        "question": TEXT,
        "image": Picture(),
    }
)
OK_VQA = Features(
    {
        "question_id": TEXT,
        "image": Picture(),
        "question": TEXT,
        "answers": [TEXT],
        "question_type": TEXT,
        "answer_type": TEXT,
    }
)
TEXT_VQA = Features(
    {
        "image_id": TEXT,
        "question_id": Value("int32"),
        "question": TEXT,
        "image": Picture(),
        "answers": [TEXT],
        "ocr_tokens": [TEXT],
    }
)
SCIENCE_QA = Features(
    {
        "image": Picture(),
        "question": TEXT,
        "choices": [TEXT],
        "answer": Value("int8"),
        "hint": TEXT,
        "task": TEXT,
        "grade": TEXT,
        "subject": TEXT,
        "topic": TEXT,
        "category": TEXT,
        "skill": TEXT,
        "lecture": TEXT,
        "solution": TEXT,
    }
)
ST_VQA = Features({"question_id": NUMBER, "question": TEXT, "image": Picture(), "answers": [TEXT]})
DOC_VQA = Features(
    {
        "questionId": TEXT,
        "question": TEXT,
        "question_types": [TEXT],
        "image": Picture(),
        "docId": NUMBER,
        "ucsf_document_id": TEXT,
        "ucsf_document_page_no": TEXT,
        "answers": [TEXT],
        "data_split": TEXT,
    }
)
TALLY_QA = Features({"image": Picture(), "qa": [{"question": TEXT, "answer": TEXT, "is_simple": Value("bool")}]})
COCO_CAPTION = Features({"question_id": TEXT, "image": Picture(), "question": TEXT, "answer": [TEXT], "id": NUMBER})
MMMU = Features(
    {
        "id": TEXT,
        "question": TEXT,
        "options": TEXT,
        "explanation": TEXT,
        **{f"image_{number}": Picture() for number in range(1, 8)},
        "img_type": TEXT,
        "answer": TEXT,
        "topic_difficulty": TEXT,
        "question_type": TEXT,
        "subfield": TEXT,
    }
)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as a file's bytes."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> bytes:
    """A PNG of one colour."""
    return encoded(Image.new("RGB", size, colour))


def stored(content: bytes, path: str | None = None) -> dict[str, Any]:
    """A picture as the hub's files store it."""
    return {"bytes": content, "path": path}


def write_hub(folder: Path, split: str, features: Features, rows: Sequence[Mapping[str, Any]]) -> Path:
    """`rows` as the parquet file of `split`; columns that a row leaves out are null."""
    folder.mkdir(parents=True, exist_ok=True)
    full = [{name: row.get(name) for name in features} for row in rows]
    Dataset.from_list(full, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def write_json(path: Path, content: Any) -> None:
    """An annotation file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_picture(path: Path, content: bytes) -> None:
    """A picture file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
