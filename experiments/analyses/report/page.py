"""The HTML page of a report, with everything that it needs inside.

Whatever comes from results is escaped: as HTML by Jinja in page.html, inside plots by `charts/marks.py`. As a second
line of defence the page has a policy by which only the scripts written here run (by their hashes), and nothing is ever
requested.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from plotly.offline import get_plotlyjs

from experiments.analyses.report.parts import Plot, Report

HERE = Path(__file__).parent


def page_of(report: Report) -> str:
    """The text of the page."""
    script, library = (HERE / "page.js").read_text(encoding="utf-8"), get_plotlyjs()
    pages = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    return pages.get_template("page.html").render(
        report=report,
        policy=policy(library, script),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        plots=script_safe([plot for section in report.sections for plot in section.plots]),
        library=library,
        script=script,
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
