"""The page for one's own model: its code is the project's code, and its families are known."""

import re

import pytest

from experiment_core_utils.primitives.files import REPOSITORY

PAGE = (REPOSITORY / "docs" / "bring_your_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("path", "code"), BLOCKS)
def test_the_code_shown_is_the_code_that_runs(path: str, code: str) -> None:
    source = (REPOSITORY / path).read_text(encoding="utf-8")
    pieces = [piece for piece in code.split("\n\n") if piece.strip()]
    for piece in pieces:
        assert piece.strip("\n") in source
    # Twenty lines, as the page promises.
    assert len(code.splitlines()) <= 20


def test_there_is_code_for_tokens_and_for_operations() -> None:
    assert [path.rpartition("/")[2] for path, _ in BLOCKS] == [
        "vision_tokens.py",
        "tilings.py",
        "decoder_table.py",
    ]
