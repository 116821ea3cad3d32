"""The HTML page of a report, with everything that it needs inside.

Whatever comes from results is escaped: as HTML by Jinja in page.html, inside plots by `charts/plotly_charts.py`. As a
second line of defence the page has a policy by which only the scripts written here run (by their hashes), and nothing
is ever requested.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiment_core_utils.primitives.errors import package_of_extra
from experiment_core_utils.primitives.files import write_text_atomically
from experiments.analyses.report.analyses import analyse
from experiments.analyses.report.content import report_of, without_folders
from experiments.analyses.report.parts import Report

HERE = Path(__file__).parent


def write_report(results_dirs: Sequence[Path], output: Path, budget_ms: float | None = None) -> None:
    """Analyse the results and write the page; raises ResultsError, or ConfigurationError where plotly is missing.

    Args:
        budget_ms: as in `report_of`.
    """
    write_page(page_of(report_of(analyse(results_dirs), budget_ms)), output)


def write_page(page: str, output: Path) -> None:
    """Write a page; names of folders that are not UTF-8 have letters that it lacks."""
    write_text_atomically(page.encode(errors="backslashreplace").decode(), output)


def pages(folder: Path = HERE) -> Environment:
    """The templates in a folder, and those of this module."""
    found = Environment(
        loader=FileSystemLoader([folder, HERE]), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    found.filters["shared"] = without_folders
    return found


def page_of(report: Report) -> str:
    """The text of the page; raises ConfigurationError where plotly, which draws the pictures, is not installed."""
    return rendered("page.html", plots_of(report), report=report)


def rendered(name: str, plots: Mapping[str, Any], folder: Path = HERE, **content: Any) -> str:
    """The text of a page with pictures, which has the style and the script of a report.

    Args:
        name: of its template in the folder.
        plots: the name of each plot -> its data and layout.

    Raises:
        ConfigurationError: plotly, which draws the pictures, is not installed.
    """
    with package_of_extra("plotly", "report"):
        from plotly.offline import get_plotlyjs
    script, library = (HERE / "page.js").read_text(encoding="utf-8"), get_plotlyjs()
    return (
        pages(folder)
        .get_template(name)
        .render(
            policy=policy(library, script),
            style=(HERE / "page.css").read_text(encoding="utf-8"),
            plots=script_safe(plots),
            library=library,
            script=script,
            **content,
        )
    )


def policy(*scripts: str) -> str:
    """The content policy: only these scripts run, and nothing is loaded from anywhere."""
    hashes = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def plots_of(report: Report) -> dict[str, Any]:
    """The name of each plot on the page, a chart's with the number of the panel -> its data and layout."""
    with package_of_extra("plotly", "report"):
        from experiments.analyses.charts.plotly_charts import plotly_of
    panels = {
        f"{chart.name}-{number}": panel
        for section in report.sections
        for chart in section.charts
        for number, panel in enumerate(chart.panels)
    }
    panels |= dict([report.instead]) if report.instead is not None else {}
    panels |= {front.name: front.panel for front in report.fronts if front.panel is not None}
    return {name: plotly_of(panel).to_plotly_json() for name, panel in panels.items()}


def script_safe(plots: Mapping[str, Any]) -> str:
    """JSON of the plots that cannot end the element that it is in."""
    text = json.dumps(dict(plots), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
