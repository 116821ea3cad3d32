"""A report in a real browser: it loads without a complaint or a request, its table sorts, a hover names the setting."""

from collections.abc import Iterator

import pytest

from experiments.core_exp.report import main
from tests.experiments.analyses.report.headless_browser import Page, find_browser, open_browser
from tests.experiments.reported_sweep import reported_folder

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine; .ci/run installs Debian's where it is root and apt works"
)
ROWS = "[...document.querySelectorAll('#columns tbody tr')]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("reported")
    assert main([str(reported_folder(folder / "run")), "--output", str(folder / "report.html")]) == 0
    assert BROWSER is not None
    with open_browser(BROWSER, folder / "browser") as opened:
        opened.open(folder / "report.html", "document.body && document.body.dataset.drawn")
        yield opened


def column(page: Page, name: str) -> list[str]:
    """The texts of a column of the settings' table, top to bottom."""
    place = headings(page).index(name)
    return list(page.run(f"{ROWS}.map(row => row.cells[{place}].textContent)"))


def headings(page: Page) -> list[str]:
    return list(page.run("[...document.querySelectorAll('#columns th')].map(each => each.textContent)"))


def centre(page: Page, element: str) -> tuple[float, float]:
    """Of an element, which is scrolled into view."""
    page.run(f"({element}).scrollIntoView({{behavior: 'instant', block: 'center', inline: 'center'}})")
    x, y = page.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])(({element}).getBoundingClientRect())")
    return x, y


def heading(page: Page, name: str) -> str:
    return f"document.querySelectorAll('#columns th button')[{headings(page).index(name)}]"


def test_it_loads_without_a_complaint_and_asks_for_nothing(page: Page) -> None:
    assert page.problems() == []
    assert [url.rpartition("/")[2] for url in page.requested()] == ["report.html"]
    drawn = page.run("document.querySelectorAll('.plot:has(.main-svg)').length")
    assert drawn == page.run("document.querySelectorAll('.plot:not(details *)').length") and drawn >= 15


def test_folded_pictures_are_drawn_where_they_are_opened(page: Page) -> None:
    page.run("document.querySelector('details.fold').open = true, 0")
    page.wait("[...document.querySelectorAll('.fold .plot')].every(each => each.querySelector('.main-svg'))")
    assert page.run("document.querySelectorAll('.fold .plot').length") >= 2
    page.run("document.querySelector('details.fold').open = false, 0")


def test_texts_of_results_stay_texts(page: Page) -> None:
    # The last part of a path with a slash in it.
    assert page.run("document.title") == "script> on Scripted GPU"
    assert page.run("document.querySelectorAll('img, iframe, object').length") == 0
    assert page.run("document.scripts.length") == 3
    assert "<script>document.title=2</script>" in page.run("document.querySelector('#run').textContent")


def test_a_click_on_a_heading_sorts_by_numbers_and_another_turns_the_order(page: Page) -> None:
    before = column(page, "mean ms")
    values = [float(each) for each in before]
    # As text, 1132.0 would come before 232.0.
    assert [float(each) for each in sorted(before)] != sorted(values)
    page.click(*centre(page, heading(page, "mean ms")))
    assert [float(each) for each in column(page, "mean ms")] == sorted(values)
    assert page.run(f"{heading(page, 'mean ms')}.parentNode.ariaSort") == "ascending"
    page.click(*centre(page, heading(page, "mean ms")))
    assert [float(each) for each in column(page, "mean ms")] == sorted(values, reverse=True)


def test_headings_sort_by_keyboard(page: Page) -> None:
    page.run(f"{heading(page, 'blocks')}.focus()")
    page.press("Enter", 13)
    assert column(page, "blocks") == ["2"] * 4 + ["3"] * 4 + ["4"] * 4


def test_rows_without_a_value_stay_last(page: Page) -> None:
    place = headings(page).index("P95 ms")
    page.run(f"delete {ROWS}[3].cells[{place}].dataset.key, {ROWS}[3].cells[{place}].textContent = 'absent', 0")
    for _ in range(2):
        page.click(*centre(page, heading(page, "P95 ms")))
        assert column(page, "P95 ms")[-1] == "absent"


def test_a_hover_names_the_setting(page: Page) -> None:
    plot = "document.querySelector('[data-plot=\"front-0-latency_mean\"]')"
    x, y = centre(page, f"{plot}.querySelectorAll('.scatterlayer .point')[0]")
    page.move_mouse(x - 3, y)
    page.move_mouse(x, y)
    page.wait(f"{plot}.querySelector('.hoverlayer .hovertext')")
    text = page.run(f"{plot}.querySelector('.hoverlayer').textContent")
    assert text.startswith("tier-") and "_topk" in text and "accuracy" in text
    # A text that could be markup is shown letter by letter.
    vision = "document.querySelector('[data-plot=\"e1_scaling-0\"]')"
    x, y = centre(page, f"{vision}.querySelectorAll('.scatterlayer .point')[0]")
    page.move_mouse(x - 3, y)
    page.move_mouse(x, y)
    page.wait(f"{vision}.querySelector('.hoverlayer .hovertext')")
    assert '<img src="https://example.org' in page.run(f"{vision}.querySelector('.hoverlayer').textContent")
    assert page.problems() == []


def test_nothing_reaches_over_the_edge_of_a_narrow_window(page: Page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=800, height=900, deviceScaleFactor=1, mobile=False)
    page.wait("window.innerWidth === 800")
    page.wait("document.documentElement.scrollWidth <= 800")
    page.wait("[...document.querySelectorAll('.plot')].every(each => "
              "!each.clientWidth || each.querySelector('.main-svg').getBoundingClientRect().right <= 800)")  # fmt: skip
    page.call("Emulation.clearDeviceMetricsOverride")


def test_titles_of_axes_are_whole_on_a_telephone(page: Page) -> None:
    wide = page.run("document.querySelectorAll('.plot .xtitle tspan').length")
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=True)
    page.wait(f"document.querySelectorAll('.plot .xtitle tspan').length > {wide}")
    # Longer ones are in several lines, each of them within the plot.
    page.wait("[...document.querySelectorAll('.plot')].every(each => { const own = each.getBoundingClientRect();"
              "const title = each.querySelector('.xtitle')?.getBoundingClientRect();"
              "return !title || (title.left >= own.left && title.right <= own.right); })")  # fmt: skip
    page.call("Emulation.clearDeviceMetricsOverride")
    page.wait(f"document.querySelectorAll('.plot .xtitle tspan').length === {wide}")


def test_a_dark_scheme_has_light_text(page: Page) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait("getComputedStyle(document.body).color === 'rgb(228, 232, 235)'")
    page.wait("getComputedStyle(document.querySelector('.plot .xtick text')).fill === 'rgb(228, 232, 235)'")
    page.call("Emulation.setEmulatedMedia", features=[])


def test_a_table_that_is_cut_says_so_until_it_is_scrolled_to_its_end(page: Page) -> None:
    box = "document.querySelector('#columns .scroll')"
    hint = "getComputedStyle(document.querySelector('#columns .sideways')).display"
    page.run(f"{box}.style.width = '300px', dispatchEvent(new Event('resize')), 0")
    assert page.run(f"{box}.classList.contains('cut')") and page.run(hint) == "inline"
    page.run(f"{box}.scrollLeft = {box}.scrollWidth, 0")
    page.wait(f"!{box}.classList.contains('cut')")
    page.run(f"{box}.scrollLeft = 0, {box}.style.width = '5000px', dispatchEvent(new Event('resize')), 0")
    assert not page.run(f"{box}.classList.contains('cut')") and page.run(hint) == "none"
    page.run(f"{box}.style.width = '', dispatchEvent(new Event('resize')), 0")


FRONT = "document.querySelector('#front .plot')"


def test_cost_and_axis_of_the_front_are_chosen_by_buttons(page: Page) -> None:
    title = "document.querySelector('#front .xtitle').textContent"
    assert page.run(title) == "mean end-to-end latency (ms)"
    page.click(*centre(page, "document.querySelector('#front [value=FLOPs]')"))
    page.wait(f"{title} === 'mean operations of a request (GFLOP)'")
    page.click(*centre(page, "document.querySelector('#front [value=log]')"))
    page.wait(f"{FRONT}.layout.xaxis.type === 'log'")
    # A cost without a front says why, in place of the picture.
    page.click(*centre(page, "document.querySelector('#front [value=energy]')"))
    page.wait(f"{FRONT}.hidden")
    assert page.run("document.querySelector('#front figcaption:not([hidden])').textContent").startswith("No chart by")
    page.click(*centre(page, "document.querySelector('#front [value=\"mean ms\"]')"))
    page.click(*centre(page, "document.querySelector('#front [value=zero]')"))
    page.wait(f"!{FRONT}.hidden && {FRONT}.layout.xaxis.type === 'linear'")


def test_samples_are_filtered(page: Page) -> None:
    """The low tier has half of the points, so that no sample is right at its settings."""
    shown = "document.querySelectorAll('#samples article:not([hidden])').length"
    assert page.run(shown) == 4
    page.click(*centre(page, "document.querySelector('#samples [value=wrong]')"))
    page.run("(select => { select.value = '11'; select.dispatchEvent(new Event('change')); })"
             "(document.querySelector('#samples select')), 0")  # fmt: skip
    page.wait(f"{shown} === 0")
    page.click(*centre(page, "document.querySelector('#samples [value=all]')"))
    page.wait(f"{shown} === 4")
    assert page.run("document.querySelectorAll('#samples li.chosen').length") == 4


def test_names_stand_above_bars_on_a_telephone(page: Page) -> None:
    bars = "document.querySelector('[data-plot=\"e1_settings-0\"]')"
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
    page.wait(f"{bars}.layout.yaxis.showticklabels === false")
    # The bars have most of the window's width.
    page.wait(f"{bars}.querySelector('.nsewdrag').getBoundingClientRect().width > 240")
    page.call("Emulation.clearDeviceMetricsOverride")
    page.wait(f"{bars}.layout.yaxis.showticklabels !== false")


def test_the_table_is_copied_as_markdown_and_latex_with_how_it_was_measured(page: Page) -> None:
    """What is copied starts with the headings of the first table, whose rows follow one a line."""
    number = page.run("document.querySelectorAll('#settings tbody tr').length")
    for form, first, rule in (("markdown", "| setting | ", 1), ("latex", "\\begin{table}", 3)):
        page.run(f"document.querySelector('[data-copy={form}]').click(), 0")
        text = page.run(f"document.querySelector('[data-copy={form}]').value")
        lines = text.splitlines()
        assert lines[0].startswith(first) and lines[rule].startswith({1: "| ---", 3: "\\hline"}[rule])
        end = {"markdown": "", "latex": "\\end{tabular}"}[form]
        assert lines.index(end) == rule + 1 + number
        assert "Scripted GPU" in lines[-1 if form == "markdown" else -2]
