"""Small pieces of HTML for notebooks: no script, nothing from elsewhere, readable on light and on dark pages.

Texts and lines have the page's own colour, whatever its theme is; marks have colours of 3 : 1 or more on white and on
black.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from experiment_core_utils.primitives.texts import ABSENT

BLUE, GREY = "#2f86c5", "#8a8a8a"
STYLE = (
    "<style>.knobprof{max-width:1100px;font-variant-numeric:tabular-nums}"
    ".knobprof p{margin:4px 0}.knobprof ul{margin:4px 0;padding-left:20px}"
    ".knobprof .scroll{overflow:auto;max-height:420px}"
    ".knobprof table{border-collapse:collapse;margin:6px 0;font-size:12px}"
    ".knobprof :is(th,td){padding:2px 8px;text-align:right;white-space:nowrap;"
    "border-bottom:1px solid rgba(128,128,128,.35)}"
    ".knobprof :is(th,td).text{text-align:left}.knobprof .wrap{white-space:normal}"
    ".knobprof .quiet{opacity:.75;font-size:12px}.knobprof svg{max-width:100%;height:auto}</style>"
)


def block(*parts: str) -> str:
    """The output of a cell, of parts that are HTML."""
    inside = "".join(parts).replace(STYLE, "")  # of pieces that are outputs by themselves
    return f'{STYLE}<div class="knobprof">{inside}</div>'


def paragraph(text: str, *, bold: str = "", is_quiet: bool = False) -> str:
    """A paragraph of a text, behind what is to be seen first."""
    first = f"<b>{escape(bold)}</b> " if bold else ""
    kind = ' class="quiet"' if is_quiet else ""
    return f"<p{kind}>{first}{escape(text)}</p>"


def listed(texts: Sequence[str]) -> str:
    """A list of texts; nothing of none."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def table(columns: Mapping[str, bool], rows: Iterable[Sequence[str]], bold: Sequence[bool] = ()) -> str:
    """A table that scrolls by itself where it is large.

    Args:
        columns: heading -> whether texts are below it, which stand on the left.
        bold: whether each row is; empty for none.
    """
    kinds = [' class="text"' if is_text else "" for is_text in columns.values()]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    lines = []
    for number, row in enumerate(rows):
        cells = (f"<b>{escape(cell)}</b>" if bold and bold[number] else escape(cell) for cell in row)
        lines.append("".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, kinds, strict=True)))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def field_table(values: Mapping[str, Any]) -> str:
    """A table of names and values."""
    rows = (
        f'<tr><th class="text">{escape(name)}</th><td class="text wrap">{escape(shown(value))}</td></tr>'
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def folded(title: str, content: str) -> str:
    """HTML that a reader opens."""
    return f'<details><summary class="quiet">{escape(title)}</summary>{content}</details>'


def shown(value: Any) -> str:
    """A value in few characters; absent is a dash."""
    if value is None or value == ():
        return ABSENT
    if isinstance(value, tuple | list):
        return ", ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
