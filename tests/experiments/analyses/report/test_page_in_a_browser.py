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
ROWS = "[...document.querySelectorAll('#settings tbody tr')]"


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
    return list(page.run("[...document.querySelectorAll('#settings th')].map(each => each.textContent)"))


def centre(page: Page, element: str) -> tuple[float, float]:
    """Of an element, which is scrolled into view."""
    page.run(f"({element}).scrollIntoView({{behavior: 'instant', block: 'center', inline: 'center'}})")
    x, y = page.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])(({element}).getBoundingClientRect())")
    return x, y


def heading(page: Page, name: str) -> str:
    return f"document.querySelectorAll('#settings th button')[{headings(page).index(name)}]"


def test_it_loads_without_a_complaint_and_asks_for_nothing(page: Page) -> None:
    assert page.problems() == []
    assert [url.rpartition("/")[2] for url in page.requested()] == ["report.html"]
    drawn = page.run("document.querySelectorAll('.plot:has(.main-svg)').length")
    assert drawn == page.run("document.querySelectorAll('[data-plot]').length") and drawn >= 15


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
    plot = "document.querySelector('[data-plot=\"e2_front_latency_mean-0\"]')"
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
              "each.querySelector('.main-svg').getBoundingClientRect().right <= 800)")  # fmt: skip
    page.call("Emulation.clearDeviceMetricsOverride")


def test_titles_of_axes_are_whole_on_a_telephone(page: Page) -> None:
    wide = page.run("document.querySelectorAll('.plot .xtitle tspan').length")
    page.call("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=True)
    page.wait("window.innerWidth === 400")
    # Longer ones are in several lines, each of them within the plot.
    page.wait("[...document.querySelectorAll('.plot')].every(each => { const own = each.getBoundingClientRect();"
              "const title = each.querySelector('.xtitle')?.getBoundingClientRect();"
              "return !title || (title.left >= own.left && title.right <= own.right); })")  # fmt: skip
    assert page.run("document.querySelectorAll('.plot .xtitle tspan').length") > wide
    page.call("Emulation.clearDeviceMetricsOverride")
    page.wait(f"document.querySelectorAll('.plot .xtitle tspan').length === {wide}")


def test_a_dark_scheme_has_light_text(page: Page) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait("getComputedStyle(document.body).color === 'rgb(228, 232, 235)'")
    page.wait("getComputedStyle(document.querySelector('.plot .xtick text')).fill === 'rgb(228, 232, 235)'")
    page.call("Emulation.setEmulatedMedia", features=[])


def test_a_table_that_is_cut_says_so_until_it_is_scrolled_to_its_end(page: Page) -> None:
    box = "document.querySelector('#settings .scroll')"
    hint = "getComputedStyle(document.querySelector('#settings .sideways')).display"
    page.run(f"{box}.style.width = '300px', dispatchEvent(new Event('resize')), 0")
    assert page.run(f"{box}.classList.contains('cut')") and page.run(hint) == "inline"
    page.run(f"{box}.scrollLeft = {box}.scrollWidth, 0")
    page.wait(f"!{box}.classList.contains('cut')")
    page.run(f"{box}.scrollLeft = 0, {box}.style.width = '5000px', dispatchEvent(new Event('resize')), 0")
    assert not page.run(f"{box}.classList.contains('cut')") and page.run(hint) == "none"
    page.run(f"{box}.style.width = '', dispatchEvent(new Event('resize')), 0")
