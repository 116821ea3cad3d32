"""HTML for notebooks: texts are escaped, absent is a dash, and nothing comes from elsewhere."""

import pytest

from experiment_core_utils.primitives.notebook_html import (
    STYLE,
    block,
    field_table,
    folded,
    listed,
    paragraph,
    shown,
    table,
)


def test_texts_are_escaped() -> None:
    parts = (
        paragraph("<a>", bold="<b>"),
        listed(["<c>"]),
        table({"<d>": True}, [["<e>"]]),
        field_table({"<f>": "<g>"}),
        folded("<h>", ""),
    )
    found = block(*parts)
    assert [letter for letter in "abcdefgh" if f"&lt;{letter}&gt;" not in found] == []
    assert paragraph("x") == "<p>x</p>" and paragraph("x", is_quiet=True) == '<p class="quiet">x</p>'
    assert listed([]) == "" and found.startswith(STYLE)


def test_numbers_stand_on_the_right_and_marked_rows_are_bold() -> None:
    found = table({"setting": True, "ms": False}, [["low", "1"], ["high", "2"]], [False, True])
    assert '<th class="text">setting</th><th>ms</th>' in found
    assert '<tr><td class="text">low</td><td>1</td></tr>' in found
    assert '<tr><td class="text"><b>high</b></td><td><b>2</b></td></tr>' in found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ((), "–"),
        (0.0, "0"),
        (1234.56, "1235"),
        (81126280, "81126280"),
        ((0.25, None), "0.25, –"),
        ("a", "a"),
    ],
)
def test_values_are_short(value: object, text: str) -> None:
    assert shown(value) == text
