"""Limits of what is computed and drawn of a folder with many settings."""

import sys
import time

# Above, fewer draws are made, the spread is not split into effects, and the estimator is fitted to some of them.
MOST_SETTINGS = 1000
# A knob of more values is not held at each of them.
MOST_VALUES = 100
FEWEST_DRAWS = 100
# Settings that the estimator is fitted to where there are more than MOST_SETTINGS.
MOST_FITTED = 500
# Of those off a front, in a figure of more than MOST_SETTINGS.
MOST_DRAWN = 300
# Values of the vision knob, each of which is a panel or a group of bars, in a figure of stages.
MOST_PANELS = 12


def draws_for(num_settings: int, num_draws: int) -> int:
    """The number of paired draws for so many settings: as requested up to MOST_SETTINGS, then fewer in proportion."""
    if num_settings <= MOST_SETTINGS:
        return num_draws
    return min(num_draws, max(FEWEST_DRAWS, num_draws * MOST_SETTINGS // num_settings))


class Steps:
    """Lines on standard error that say what is being computed; none for a folder that takes seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, num_settings: int, step: str) -> None:
        """Report that the next step begins."""
        if num_settings > MOST_SETTINGS:
            print(f"{time.monotonic() - self._started:.0f} s: {step}", file=sys.stderr, flush=True)
