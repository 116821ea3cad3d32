import json
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from experiment_core_utils.config.text import PromptSource
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.tasks.prompts import EMBEDDED_PROMPTS, read_prompts


def test_the_embedded_set_is_large_and_varied() -> None:
    texts = read_prompts(PromptSource()).texts
    assert len(texts) == len(set(texts)) == 240
    rows = [json.loads(line) for line in EMBEDDED_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert set(Counter(row["category"] for row in rows).values()) == {20} and len({row["id"] for row in rows}) == 240
    words = sorted(len(text.split()) for text in texts)
    assert words[24] <= 12 and words[-24] >= 100


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\r\n\n  second, indented\n")
    found = read_prompts(PromptSource(path=str(path)))
    assert found.texts == ("first", "  second, indented")
    assert found.source["read_from"] == "file" and found.source["path"] == str(path)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (tmp_path / "p.NDJSON").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    for name in ("p.txt", "p.NDJSON"):
        assert read_prompts(PromptSource(path=str(tmp_path / name))).texts == ("one",)


def test_jsonl_gives_one_column_and_the_digest_follows_texts_and_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "a\\nb", "id": 1}\n\n{"question": "c"}\n')
    found = read_prompts(PromptSource(path=str(path), column="question"))
    assert found.texts == ("a\nb", "c")
    (tmp_path / "turned.jsonl").write_text('{"text": "c"}\n{"text": "a\\nb"}\n')
    turned = read_prompts(PromptSource(path=str(tmp_path / "turned.jsonl")))
    assert set(turned.texts) == set(found.texts) and turned.source["digest"] != found.source["digest"]


def test_a_local_copy_of_a_dataset_is_read(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["one", "two"], "label": [0, 1]}).to_parquet(tmp_path / "train-00000-of-00001.parquet")
    found = read_prompts(PromptSource(dataset_name=str(tmp_path)), tmp_path / "cache")
    assert found.texts == ("one", "two") and found.source["read_from"] == "parquet files"
    with pytest.raises(ConfigurationError, match=r"no column 'prompt'; prompts.column is one of label, text"):
        read_prompts(PromptSource(dataset_name=str(tmp_path), column="prompt"), tmp_path / "cache")
    with pytest.raises(ConfigurationError, match=r"row 0 contains no text but 0"):
        read_prompts(PromptSource(dataset_name=str(tmp_path), column="label"), tmp_path / "cache")
    with pytest.raises(ConfigurationError, match=r"contains no copy with a split 'test'"):
        read_prompts(PromptSource(dataset_name=str(tmp_path), split="test"), tmp_path / "cache")


def test_a_dataset_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"^prompts from nobody/nothing, split train: ") as caught:
        read_prompts(PromptSource(dataset_name="nobody/nothing"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "{", r"p.jsonl, line 1 is not JSON"),
        ("p.jsonl", '{"text": "a"}\n{"prompt": "b"}', r"line 2 has no 'text' \(found: prompt\)"),
        ("p.jsonl", '{"text": ""}', r"line 1 contains no text but ''"),
        ("p.jsonl", '"a"', r"line 1 has no 'text' \(found: str\)"),
        ("p.json", '["a"]', r"read from JSONL .* not from .json"),
        ("p.CSV", "text\na", r"not from .csv"),
        ("p.jsonl", '{"text": "a \\ud800 b"}', r"line 1 contains half a surrogate pair"),
        ("p.txt", "\n \n", r"p.txt contains no prompts"),
    ],
)
def test_a_file_without_use_is_named_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_prompts(PromptSource(path=str(tmp_path / name)))
