"""In: settings and samples as they are done; out: a bar with the time left, or a line a minute where nobody watches."""

import sys
from types import TracebackType

from tqdm import tqdm

UNWATCHED_INTERVAL_S = 60.0


class ProgressBar:
    """Counts samples over all settings and names the setting at work.

    Args:
        shown: False counts silently (processes other than the main one).
    """

    def __init__(self, num_settings: int, samples_per_setting: int, shown: bool) -> None:
        self._per_setting = samples_per_setting
        self._num_settings = num_settings
        self._started = 0
        watched = sys.stderr.isatty()
        self._bar = tqdm(
            total=num_settings * samples_per_setting,
            unit="sample",
            disable=not shown,
            mininterval=0.2 if watched else UNWATCHED_INTERVAL_S,
            dynamic_ncols=watched,
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def start(self, key: str) -> None:
        """The next setting begins; what an attempt that failed had counted is set right."""
        self._settle(self._started)
        self._started += 1
        self._bar.set_description(f"{self._started}/{self._num_settings} {key}", refresh=False)

    def advance(self) -> None:
        """One sample is done."""
        if self._bar.n < self._started * self._per_setting:
            self._bar.update()

    def _settle(self, settings_done: int) -> None:
        self._bar.update(settings_done * self._per_setting - self._bar.n)
