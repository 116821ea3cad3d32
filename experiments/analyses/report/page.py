"""The HTML page of a report, with everything that it needs inside.

Whatever comes from results is escaped: as HTML here, inside plots by `charts/marks.py`. As a second line of defence the
page has a policy by which only the scripts written here run (by their hashes), and nothing is ever requested.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from experiments.analyses.report.parts import Column, Plot, Report, ReportCaveat, ReportTable, Section, Value

HERE = Path(__file__).parent


def page_of(report: Report) -> str:
    """The text of the page."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    library = get_plotlyjs()
    plots = [plot for section in report.sections for plot in section.plots]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(library, script))}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(report.title)}</title>",
            f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style>",
            "</head>",
            "<body>",
            *_body(report),
            f'<script type="application/json" id="plots">{script_safe(plots)}</script>',
            f"<script>{library}</script>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def policy(*scripts: str) -> str:
    """The content policy: only these scripts run, and nothing is loaded from anywhere."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def script_safe(plots: Sequence[Plot]) -> str:
    """JSON of the plots that cannot end the element that it is in."""
    content = {each.name: {"data": each.data, "layout": each.layout} for each in plots}
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _body(report: Report) -> list[str]:
    links = [("says", "Findings"), ("caveats", "Caveats"), ("settings", "Settings")]
    links += [(section.name, section.title) for section in report.sections] + [("run", "How it was measured")]
    return [
        "<header>",
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="subtitle">{escape(report.subtitle)}</p>',
        "<nav>" + "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in links) + "</nav>",
        "</header>",
        "<main>",
        "<noscript><p>Plots and sorting need JavaScript, which is in this page and off in this browser.</p></noscript>",
        '<div class="top">',
        '<section id="says">',
        "<h2>What this run says</h2>",
        _list(report.statements) if report.statements else "<p>Too little was measured to say anything.</p>",
        "</section>",
        '<section id="caveats">',
        "<h2>Before you use the numbers</h2>",
        "<ul>" + "".join(map(_caveat, report.caveats)) + "</ul>" if report.caveats else "<p>No caveats.</p>",
        "</section>",
        "</div>",
        '<section id="settings">',
        "<h2>Settings</h2>",
        '<p class="intro">Click a heading to sort by it, click again to turn the order.</p>',
        _table(report.settings),
        "</section>",
        *(_section(section) for section in report.sections),
        '<section id="run">',
        "<h2>How it was measured</h2>",
        _facts(report.facts),
        *(f"<pre>{escape(command)}</pre>" for command in report.commands),
        "</section>",
        "</main>",
    ]


def _list(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _caveat(caveat: ReportCaveat) -> str:
    text = escape(caveat.text)
    if caveat.scope is None:
        return f"<li>{text}</li>"
    if not caveat.details:
        return f'<li>{text} <span class="scope">{escape(caveat.scope)}</span></li>'
    return f"<li>{text}<details><summary>{escape(caveat.scope)}</summary>{_list(caveat.details)}</details></li>"


def _table(table: ReportTable) -> str:
    head = "".join(map(_heading, table.columns))
    rows = "".join(
        "<tr>" + "".join(_cell(value, column) for value, column in zip(row, table.columns, strict=True)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _heading(column: Column) -> str:
    kind = ' class="number"' if column.is_number else ""
    return (
        f'<th scope="col" aria-sort="none"{kind}><button type="button" title="{escape(column.meaning)}">'
        f"{escape(column.label)}</button></th>"
    )


def _cell(value: Value, column: Column) -> str:
    kind = ' class="number"' if column.is_number else ""
    key = "" if value.key is None else f' data-key="{escape(str(value.key))}"'
    text = '<span class="absent" title="not there">–</span>' if value.text is None else escape(value.text)
    return f"<td{kind}{key}>{text}</td>"


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}">', f"<h2>{escape(section.title)}</h2>"]
    if section.intro:
        parts.append(f'<p class="intro">{escape(section.intro)}</p>')
    if section.plots:
        parts += ['<div class="plots">', *map(_figure, section.plots), "</div>"]
    parts += [f'<p class="reason">{escape(reason)}</p>' for reason in section.reasons]
    return "\n".join([*parts, "</section>"])


def _figure(plot: Plot) -> str:
    note = "" if plot.note is None else f"<p>{escape(plot.note)}</p>"
    return (
        f'<figure class="{plot.width}"><figcaption><h3>{escape(plot.title)}</h3>{note}</figcaption>'
        f'<div class="plot" data-plot="{escape(plot.name)}" style="height:{plot.height_px}px" role="img" '
        f'aria-label="{escape(plot.title)}"></div></figure>'
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"
