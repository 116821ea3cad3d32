"""The common look of all figures, and their files as PNG and SVG."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from experiment_core_utils.primitives.files import replaced_whole
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.tasks.datasets.pictures import open_picture
from experiments.analyses.sweeps import SweepProvenance

# Colours that stay apart in all common kinds of colour blindness, and in grey: M. Okabe and K. Ito, "Color universal
# design" (2008).
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
INK, QUIET, GRID, LIGHT_GREY = "#222222", "#666666", "#E3E3E3", "#BBBBBB"
STAGE_COLOURS = {"vision": BLUE, "prefill": ORANGE, "decode": GREEN}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    # Element ids that do not change from run to run.
    "svg.hashsalt": "figures",
    "path.simplify": True,
}
DPI = 110
COLOURS = 128


def ink_on(fill: str) -> str:
    """The colour of a text on a fill: white or dark, whichever has more contrast.

    By the relative luminance of the Web Content Accessibility Guidelines 2.2; one of both reaches 4.5 : 1 on any fill.
    """
    parts = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    # Equal contrast with white (1.05) and black (0.05).
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > (1.05 * 0.05) ** 0.5 - 0.05 else "#FFFFFF"


def new_figure(width_in: float, height_in: float, caption: str) -> Figure:
    """An empty figure in the common look; `caption` (device, model, n) is written small at its foot.

    Make axes with `figure.subplots`, inside `with mpl.rc_context(STYLE):`, so that they have the look too.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        # An artist of the figure itself, so that the layout keeps room for it.
        # Names are given by users: no formula begins at a dollar, and half a surrogate pair has no glyph.
        shown = fill(caption.encode(errors="backslashreplace").decode(), int(16 * width_in))
        figure.supxlabel(shown, fontsize=7.5, color=QUIET, x=0.01, ha="left", parse_math=False)
        return figure


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write `name`.png and `name`.svg into `folder`, which is created, and return both; equal data give equal files.

    Raises:
        ResultsNotSaved: the disk does not take it.
    """
    paths = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context(STYLE):
        pixels = BytesIO()
        figure.savefig(pixels, dpi=DPI, format="png")
        # Few colours are in it, so that a palette is a third of the size. It is spread over all of them, however few
        # pixels have one: by their count alone rare colours of a legend become one.
        picture = open_picture(pixels.getvalue(), name).image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
        with replaced_whole(paths[0]) as temporary:
            picture.save(temporary, format="png", optimize=True)
        # The places found for the pixels are those of the drawing too.
        figure.set_layout_engine("none")
        with replaced_whole(paths[1]) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    return paths


def caption_of(shared: Sequence[SweepProvenance], num_settings: int, num_samples: int) -> str:
    """The line at a figure's foot: device, model, how it ran, how much data there is, and what weakens it.

    Args:
        shared: of each sweep that the figure is about.
    """
    size = f"n = {counted(num_samples, 'generation')}, {counted(num_settings, 'setting')}"
    weak = ["random weights"] if any(each.random_weights for each in shared) else []
    tasks = sorted({task for each in shared for task in each.tasks})
    return joined_caption([*joint_setup(shared), size, tasks_named(tasks), *weak])


def joint_setup(shared: Iterable[SweepProvenance]) -> tuple[str, ...]:
    """`setup_of` of several sweeps, with each part once."""
    return tuple(" / ".join(dict.fromkeys(parts)) for parts in zip(*map(setup_of, shared), strict=True))


def setup_of(provenance: SweepProvenance) -> tuple[str, ...]:
    """The measuring setup: device, model, how it ran; the parts of a caption that do not count anything."""
    return provenance.device, Path(provenance.model).name, provenance.how


def tasks_named(tasks: Iterable[str]) -> str:
    """The names of tasks as part of a caption."""
    return ", ".join(task.replace("_", " ") for task in tasks)


def joined_caption(parts: Iterable[str]) -> str:
    """The line of a caption's parts."""
    return "  ·  ".join(parts)
