"""The chart of compare_runs.py: how far each run is from the first, setting by setting."""

from collections.abc import Sequence

from experiments.analyses.charts.chart import Axis, Chart, Dots, Mark, Panel, Rule, Symbol, thinned
from experiments.analyses.charts.style import BLUE, GREEN, ORANGE, PURPLE, QUIET, SKY, VERMILION
from experiments.analyses.two_runs import RunDifference, title_of

RUN_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
RUN_SYMBOLS: tuple[Symbol, ...] = ("circle", "square", "triangle")
# Settings in a panel; more names would be larger than their lines.
MOST_SETTINGS_SHOWN = 30


def runs_chart(lines: Sequence[RunDifference], first: str) -> Chart:
    """A panel for each quantity: the change of each setting with its interval, a colour for each run.

    Args:
        first: label of the run that the others are compared with.
    """
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    panels = [_panel([each for each in lines if each.quantity == quantity], first) for quantity in quantities]
    height = max(2.4, 1.3 + 0.24 * min(len({(each.task, each.setting) for each in lines}), MOST_SETTINGS_SHOWN))
    return Chart(
        "comparison",
        panels,
        2,
        (6.6, height),
        "bars: 95 % intervals of all settings together; no bar: too few pictures",
    )


def _panel(lines: Sequence[RunDifference], first: str) -> Panel:
    is_accuracy = lines[0].quantity == "accuracy"
    has_tasks = len({each.task for each in lines}) > 1
    names = list(dict.fromkeys((each.task, each.setting) for each in lines))
    shown = {names[at]: place for place, at in enumerate(thinned(len(names), MOST_SETTINGS_SHOWN))}
    runs = list(dict.fromkeys(each.run for each in lines))
    marks: list[Mark] = [Rule(0 if is_accuracy else 1, True, QUIET, dash="solid")]
    for number, run in enumerate(runs):
        own = [line for line in lines if line.run == run and (line.task, line.setting) in shown]
        # Side by side on the line of their setting.
        shift = (number - (len(runs) - 1) / 2) * 0.6 / len(runs)
        marks.append(
            Dots(
                [each.change for each in own],
                [shown[each.task, each.setting] + shift for each in own],
                RUN_COLOURS[number % len(RUN_COLOURS)],
                run,
                [(f"{each.setting}, {run}", f"{each.change:.3f}: {each.verdict}") for each in own],
                symbol=RUN_SYMBOLS[number % len(RUN_SYMBOLS)],
                x_intervals=[each.interval or (each.change, each.change) for each in own],
            )
        )
    ticks = {place: f"{task} {setting}" if has_tasks else setting for (task, setting), place in shown.items()}
    title = title_of(lines[0].quantity, lines)
    change = f"{title} {'minus' if is_accuracy else 'over'} that of {first}"
    return Panel(
        f"{title[0].upper()}{title[1:]}",
        Axis(change),
        Axis(ticks=ticks, limits=(-0.6, len(shown) - 0.4), is_reversed=True),
        marks,
    )
