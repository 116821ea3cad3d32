"""Colours and captions that all figures share, whichever library draws them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiment_core_utils.primitives.texts import counted
from experiments.analyses.sweeps import SweepProvenance

# Colours that stay apart in all common kinds of colour blindness, and in grey: M. Okabe and K. Ito, "Color universal
# design" (2008).
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
# More that stay apart from these: P. Tol, "Colour schemes" (2021), the muted ones.
WINE, OLIVE, INDIGO = "#882255", "#999933", "#332288"
INK, QUIET, GRID, LIGHT_GREY = "#222222", "#666666", "#E3E3E3", "#BBBBBB"
STAGE_COLOURS = {"vision": BLUE, "prefill": ORANGE, "decode": GREEN}


def ink_on(fill: str) -> str:
    """The colour of a text on a fill: white or dark, whichever has more contrast.

    By the relative luminance of the Web Content Accessibility Guidelines 2.2; one of both reaches 4.5 : 1 on any fill.
    """
    parts = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    # Equal contrast with white (1.05) and black (0.05).
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > (1.05 * 0.05) ** 0.5 - 0.05 else "#FFFFFF"


def caption_of(shared: Sequence[SweepProvenance], num_settings: int, num_samples: int) -> str:
    """The line at a figure's foot: device, model, how it ran, how much data there is, and what weakens it.

    Args:
        shared: of each sweep that the figure is about.
    """
    size = f"n = {counted(num_samples, 'generation')}, {counted(num_settings, 'setting')}"
    weak = ["random weights"] if any(run.random_weights for run in shared) else []
    tasks = sorted({task for run in shared for task in run.tasks})
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
