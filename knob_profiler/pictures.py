"""Pictures for notebooks: figures that show themselves, and the front as a few lines of SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import BytesIO

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiment_core_utils.primitives.contrasts import Word
from experiment_core_utils.primitives.notebook_html import BLUE, GREY
from experiments.analyses.charts.chart import Chart
from experiments.analyses.charts.knob_charts import short_name
from experiments.analyses.charts.matplotlib_charts import figure_of
from experiments.analyses.knobs.fronts import FrontPoint
from experiments.analyses.knobs.records import FrontAnalysis

# Of the SVG: its size, and the corners of the plotted area in it.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 264, 40, 628, 24, 218
MOST_NAMES = 8
LEGEND = "on the front: ● yes, ○ likely or can't tell, · no; ◇ the reference"
LEGEND_WITHOUT_WORDS = "nothing is concluded, and so nothing is said of the front; ◇ the reference"


def figure_for_notebooks(chart: Chart, caption: str) -> Figure:
    """The figure of a chart; the last value of a cell is shown, also without `%matplotlib inline`."""
    figure = figure_of(chart, caption)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: Figure) -> bytes:
    pixels = BytesIO()
    figure.savefig(pixels, format="png", dpi=110)
    return pixels.getvalue()


def front_svg(each: FrontAnalysis, words: Mapping[str, Word]) -> str:
    """Accuracy over cost of each setting, those on the front by name; a few kB.

    Args:
        words: how sure it is that each setting is on the front; empty where nothing is said of it.
    """
    found, points = each.found, each.front.points
    area = _Area.of(points, found.best)
    names = {point.key: short_name(point) for point in found.points}
    references = {point.key for point in found.points if point.is_reference}
    marks = []
    for point in points:
        x, y = area.place(point.cost, point.accuracy)
        figures = f"{point.cost:.4g} {found.of.unit}, {found.score_name} {point.accuracy:.3f}"
        figures += f", on the front: {words[point.key]}" if words else ""
        marks.append(
            f"<g><title>{escape(point.key)}: {escape(figures)}</title>{_dot(words.get(point.key, 'no'), x, y)}</g>"
        )
        if point.key in references:
            marks.append(f'<path d="M{x - 9} {y}l9 -9 9 9 -9 9z" fill="none" stroke="currentColor"/>')
    for point in [one for one in points if one.on_front][:MOST_NAMES]:
        x, y = area.place(point.cost, point.accuracy)
        side, shift = ("end", -10) if x > (LEFT + RIGHT) / 2 else ("start", 10)
        at = f'x="{x + shift}" y="{y - 7}" text-anchor="{side}"'
        marks.append(f"<text {at}>{escape(names[point.key])}</text>")
    axes = area.axes(f"{found.of.label} ({found.of.unit})", found.score_name)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(found.score_name)} over {found.of.label}" '
        f'fill="currentColor" font-size="11" font-family="system-ui,sans-serif">'
        f"{axes}{''.join(marks)}</svg>"
    )


@dataclass(frozen=True)
class _Area:
    """Where costs and accuracies stand in the picture."""

    most: float  #: cost at its right end; it begins at 0
    low: float  #: accuracy at its foot
    high: float  #: accuracy at its top
    best: float  #: highest accuracy that there is

    @classmethod
    def of(cls, points: Sequence[FrontPoint], best: float) -> "_Area":
        heights = [point.accuracy for point in points]
        room = max(0.14 * (max(heights) - min(heights)), 0.02 * best)
        return cls(1.06 * max(point.cost for point in points), max(min(heights) - room, 0.0), max(heights) + room, best)

    def place(self, cost: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * cost / self.most
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * (accuracy - self.low) / (self.high - self.low), 1)

    def axes(self, title: str, score: str) -> str:
        drawn = f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor" opacity=".6"/>'
        for cost in _ticks(0.0, self.most):
            x, _ = self.place(cost, self.low)
            drawn += f'<text x="{x}" y="{BOTTOM + 15}" text-anchor="middle">{cost:.10g}</text>'
        for accuracy in _ticks(self.low, min(self.high, self.best)):
            _, y = self.place(0.0, accuracy)
            drawn += f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{accuracy:.4g}</text>'
        drawn += f'<text x="4" y="{TOP - 9}">{escape(score)}</text>'
        return f'{drawn}<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(title)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of an axis."""
    return [at for at in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= at <= high]


def _dot(word: Word, x: float, y: float) -> str:
    """The mark of a setting, by how sure its place on the front is."""
    if word == "yes":
        return f'<circle cx="{x}" cy="{y}" r="5" fill="{BLUE}"/>'
    if word == "no":
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{GREY}"/>'
    return f'<circle cx="{x}" cy="{y}" r="5" fill="none" stroke="{BLUE}" stroke-width="2"/>'
