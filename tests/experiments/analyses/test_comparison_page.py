"""The page of a comparison: its sentence, picture and table by hand-made numbers, its escaping, and a real browser."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiment_core_utils.records.caveats import Caveat
from experiments.analyses.charts.chart import Band, Dots
from experiments.analyses.comparison_page import chart_of, comparison_page, picture_of, rows_of, setups_of
from experiments.analyses.sweeps import Sweep, load_sweep
from experiments.analyses.two_runs import Quantity, RunComparison, RunDifference, Verdict, title_of
from experiments.core_exp.compare_runs import main, table
from tests.experiments.analyses.report.headless_browser import find_browser, open_browser
from tests.experiments.hand_made_sweep import PROVENANCE, result, setting, write


def line(
    quantity: Quantity, verdict: Verdict, *, name: str = "s", one: float = 50.0, change: float = 0.9, run: str = ""
) -> RunDifference:
    """A setting's line; `all 2 settings` is the pooled one."""
    is_accuracy, is_pooled = quantity == "accuracy", name.startswith("all")
    other = one + change if is_accuracy else one * change
    return RunDifference(
        "signs", name, quantity, is_pooled, 20, 20, one, other, change, (change - 0.05, change + 0.05), verdict, run=run
    )  # fmt: skip


LINES = [
    line("latency", "FASTER"),
    line("latency", "FASTER", name="all 2 settings"),
    line("memory", "MORE", one=2e9, change=1.5),
    line("accuracy", "CANNOT TELL", one=0.5, change=-0.02),
    line("accuracy", "SAME", name="all 2 settings", one=0.5, change=-0.0),
]


def comparison(
    folder: Path, lines: Sequence[RunDifference], labels: Sequence[str] = ("x", "y"), **more: Any
) -> RunComparison:
    """Lines beside a small run of each side."""
    run: tuple[Sweep, ...] = (load_sweep(write(folder, result(setting(), **more))),)
    return RunComparison([run] * len(labels), labels, 0.02, 0.03, None, lines, ["<b>noted</b>"])


def test_the_sentence_has_every_quantity_with_its_verdict(tmp_path: Path) -> None:
    assert comparison(tmp_path, LINES).headlines == [
        "B takes 0.900 [0.850, 0.950] times as long as A: FASTER; changes accuracy by +0.000 [-0.050, +0.050]: SAME "
        "(all 2 settings)"
    ]
    several = [line("memory", "LESS", name="all 2 settings", run=run, change=0.5) for run in ("y", "z")]
    assert comparison(tmp_path, several, ("x", "y", "z")).headlines == [
        f"{run} needs 0.500 times A's memory: LESS (all 2 settings)" for run in ("y", "z")
    ]
    assert comparison(tmp_path, []).headlines[0].startswith("nothing is compared")


def test_a_score_that_is_no_accuracy_is_called_by_its_name(tmp_path: Path) -> None:
    named = [replace(each, score="100 / byte perplexity") for each in LINES]
    found = comparison(tmp_path, named)
    assert "; changes 100 / byte perplexity by +0.000 [" in found.headlines[0]
    panels = chart_of(found, found.lines).panels
    assert [panel.title for panel in panels] == ["Latency", "Memory", "100 / byte perplexity"]
    assert "100 / byte perplexity" in table(named).splitlines()[0].replace("  ", " ")
    assert "accuracy" not in comparison_page(found).split("<table")[1].split("</table>")[0]
    # Where metrics differ in it.
    assert title_of("accuracy", [*LINES, *named]) == "score" and title_of("latency", named) == "latency"


def test_what_makes_a_side_invalid_is_said_once_of_all(tmp_path: Path) -> None:
    records = [Caveat.of("foreign_load_cpu", cpu_fraction=fraction).model_dump() for fraction in (0.2, 0.9)]
    found = comparison(tmp_path, LINES, caveat_records=records)
    (said,) = found.voided_by
    assert said.startswith("INVALID: background load: other processes used 90% of the CPUs") and said.endswith("(A, B)")
    assert found.content()["voided_by"] == [said]
    place = '<ul class="invalid"><li>'
    assert f"{place}{said}" in comparison_page(found) and place not in comparison_page(comparison(tmp_path, LINES))


def test_the_table_has_a_row_for_each_setting_all_together_first() -> None:
    together, single = rows_of(LINES, ("accuracy", "latency", "memory"))
    assert (together.name, together.is_pooled, single.name) == ("all 2 settings", True, "s")
    cells = [None if each is None else (each.change, each.verdict, each.figures, each.kind) for each in single.cells]
    assert cells == [
        ("-0.020", "CANNOT TELL", "[-0.070, +0.030] · 0.5 → 0.48", "neither"),
        ("× 0.900", "FASTER", "[0.850, 0.950] · 50 → 45", "good"),
        ("× 1.500", "MORE", "2000 → 3000", "bad"),
    ]
    assert together.cells[2] is None
    runs = rows_of([line("latency", "SAME", run=run) for run in ("y", "z")], ("latency",))
    assert [each.name for each in runs] == ["y · s", "z · s"]


def test_the_picture_is_of_latency_with_the_band_of_the_same(tmp_path: Path) -> None:
    found = comparison(tmp_path, LINES)
    panel = picture_of(found)
    assert panel is not None and panel.title == "Latency"
    assert list((panel.y.ticks or {}).values()) == ["all 2 settings", "s"]
    band, _, dots = panel.marks
    assert isinstance(band, Band) and list(band.x) == pytest.approx([1 / 1.02, 1.02])
    assert isinstance(dots, Dots) and dots.name == "y" and list(dots.x) == [0.9, 0.9]
    bands = [each.marks[0] for each in chart_of(found, found.lines).panels]
    assert [list(each.x) for each in bands if isinstance(each, Band)][1:] == [
        pytest.approx([1 / 1.02, 1.02]),
        [-0.03, 0.03],
    ]
    # Answered in batches: no times.
    scored = picture_of(comparison(tmp_path, LINES[3:]))
    assert scored is not None and scored.title == "Accuracy"
    assert picture_of(comparison(tmp_path, LINES[2:3])) is None


def test_sides_are_named_with_what_they_ran_on(tmp_path: Path) -> None:
    assert setups_of(comparison(tmp_path, LINES, ("x", "y", "z")))[::2] == [
        ("A", "x  ·  Scripted GPU  ·  tiny  ·  bfloat16, eager  ·  1 run"),
        ("z", "z  ·  Scripted GPU  ·  tiny  ·  bfloat16, eager  ·  1 run"),
    ]


def test_the_page_has_no_folders_of_the_machine(tmp_path: Path) -> None:
    """Labels that are equal without them are numbered."""
    labels = ["/home/me/a/run", "/home/me/b/run", "--data_file /home/me/c.jsonl"]
    lines = [line("latency", "SAME", name="all 2 settings", run=run) for run in labels[1:]]
    page = comparison_page(comparison(tmp_path, lines, labels))
    start, _, _ = page.partition("<script>")
    assert "/home/me" not in start
    assert all(each in start for each in ("run (1)", "run (2) takes 0.900", "--data_file c.jsonl"))


def test_the_page_in_a_browser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium on this machine")
    hostile = PROVENANCE["model"] | {"dtype": "</script><b>"}
    sides = [
        write(tmp_path / name, *(result(setting(top_k=top_k), model=model) for top_k in (2, 4)))
        for name, model in (("a", PROVENANCE["model"]), ("b", hostile))
    ]
    path = tmp_path / "page.html"
    assert main([*map(str, sides), "--report", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    with open_browser(browser, tmp_path / "browser", width=390) as page:
        page.open(path, "document.body && document.body.dataset.drawn")
        assert page.problems() == [] and len(page.requested()) == 1
        assert page.run("document.querySelector('h1').textContent").startswith("B takes 1.000 times as long as A: ")
        assert page.run("document.querySelectorAll('.plot:has(.main-svg)').length") == 1
        assert page.run("document.querySelectorAll('tbody tr').length") == 3
        assert page.run("document.querySelectorAll('b').length") == 0 and page.run("document.scripts.length") == 3
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
