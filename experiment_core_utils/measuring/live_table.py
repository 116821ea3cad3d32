"""What readers beside a run are shown while it measures: lines for a terminal, and results so far."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiment_core_utils.measuring.sample_runs import SettingAtWork
from experiment_core_utils.primitives.statistics import bounded_mean_interval, describe, mean_of
from experiment_core_utils.primitives.texts import ABSENT
from experiment_core_utils.records.settings import MeasuredSample
from experiment_core_utils.tasks.interface import Metric, answer_of, scores_of
from experiment_core_utils.tasks.registry import score_name


class LiveTable:
    """A line for each setting; one is made again when the setting has more samples.

    Args:
        metric: answers are scored for the table where it looks at each alone, and runs no code from elsewhere.
    """

    def __init__(self, settings: Sequence[SettingAtWork], metric: Metric) -> None:
        self._settings, self._metric = settings, metric
        self._scores: dict[tuple[str, int], float | None] = {}
        self._lines: dict[str, tuple[int, str]] = {}
        self._width = max(len(setting.key) for setting in settings)
        self._score = f"{score_name((metric.name, metric.best))} [95 %]"

    def lines(self) -> list[str]:
        """The heading and the lines, in the order of the settings."""
        heading = f"{'so far':<{self._width}}  {'samples':>9}  {self._score:<20}  mean ms [95 %]"
        return [heading, *map(self._line, self._settings)]

    def _line(self, each: SettingAtWork) -> str:
        number = each.shard.num_finished
        before, line = self._lines.get(each.key, (-1, ""))
        if before != number:
            samples = [done.measured for done in each.shard.finished.values() if done.measured is not None]
            counted = f"{number}/{len(each.shard.sample_ids)}"
            mean, width = self._mean_score(each.key, samples), max(len(self._score), 20)
            line = f"{each.key:<{self._width}}  {counted:>9}  {mean:<{width}}  {_time(samples)}"
            self._lines[each.key] = number, line
        return line

    def _mean_score(self, key: str, samples: Sequence[MeasuredSample]) -> str:
        if not self._metric.scores_each_answer or getattr(self._metric, "runs_foreign_code", False):
            return ABSENT
        for sample in samples:
            if (key, sample.sample_id) not in self._scores:
                (score,) = scores_of([answer_of(sample)], self._metric)
                self._scores[key, sample.sample_id] = score.value
        scores = [(self._scores[key, sample.sample_id], sample.image_id) for sample in samples]
        values = [value for value, _ in scores if value is not None]
        pictures = [picture for value, picture in scores if value is not None]
        mean, interval = mean_of(values), bounded_mean_interval(values, pictures, self._metric.best)
        if mean is None or interval is None:
            return ABSENT
        return f"{mean:.3f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def _time(samples: Sequence[MeasuredSample]) -> str:
    """Mean total time of the runs so far, each sample counting once."""
    runs = [(1e3 * run.total_s, sample.image_id, 1 / len(sample.runs)) for sample in samples for run in sample.runs]
    spread = describe(*zip(*runs, strict=True)) if runs else None
    if spread is None:
        return ABSENT
    if spread.ci_low is None or spread.ci_high is None:
        return f"{spread.mean:.1f}"
    return f"{spread.mean:.1f} [{spread.ci_low:.1f}, {spread.ci_high:.1f}]"


PUBLISHED_EVERY_S = 5.0


@dataclass
class Publisher:
    """Saves what has run so far for those who read beside the run: at most every 5 s and in 1 % of its time."""

    save: Callable[[], object]
    clock: Callable[[], float] = time.monotonic  #: in seconds

    def __post_init__(self) -> None:
        self._due_s = self.clock() + PUBLISHED_EVERY_S

    def __call__(self) -> None:
        """Save, if it is time."""
        began = self.clock()
        if began >= self._due_s:
            self.save()
            ended = self.clock()
            self._due_s = ended + max(PUBLISHED_EVERY_S, 100 * (ended - began))
