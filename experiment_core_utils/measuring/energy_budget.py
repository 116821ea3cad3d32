"""The seconds that energy may take where nobody requested it, and how they are divided among its windows."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiment_core_utils.meters.energy_statistics import LEAST_WINDOW_S
from experiment_core_utils.meters.windows import RELATIVE_ERROR, WARM_AGAIN_S, WindowGoal
from experiment_core_utils.primitives.replication import PASSES_THAT_DECIDE
from experiment_core_utils.records.settings import MeasuredSample

# Of the time that warm-ups and rounds took.
RUN_FRACTION = 0.2
# What a counter's resolution may leave open of a window's energy at most.
WORST_ERROR = 0.2
# Fewer requests would not stand for the task.
LEAST_SAMPLES = 4
# Of a window that lies between two ticks, the part that its samples may take to be prepared and to run once: what a
# tick leaves open is then one pass over them.
SHORT_PART = 0.25


@dataclass(frozen=True)
class CounterTicks:
    """How exactly counters show the time."""

    tick_s: float  #: longest time between two advances
    read_s: float  #: that all of them take to be read
    poll_s: float  #: most by which the moment of an advance is off where they are polled


@dataclass(frozen=True)
class WindowPlan:
    """Windows that a budget suffices for."""

    num_passes: int
    num_samples: int  #: in each window
    least_s: float  #: length that a counter's resolution calls for
    around_s: float  #: that a window waits for ticks and warms up, beside its own length
    is_between_ticks: bool  #: whether all samples together take less than a tick

    def goal(self, left_s: float) -> WindowGoal:
        """How long a window is to be that may take so many seconds with what is around it."""
        longest_s = max(left_s - self.around_s, self.least_s)
        return WindowGoal(RELATIVE_ERROR, min(LEAST_WINDOW_S, longest_s), longest_s)


@dataclass(frozen=True)
class EnergyBudget:
    """The time for the energy of all settings, and what a request takes."""

    seconds: float
    request_s: float  #: mean time of a request at the slowest setting
    prepare_s: float  #: mean time that it takes to prepare one

    @classmethod
    def of_run(cls, elapsed_s: float, measured: Mapping[str, Sequence[MeasuredSample]]) -> "EnergyBudget":
        """A fifth of what a run took; of one that was resumed at least of what its timed requests did.

        Args:
            measured: the samples of each setting, of which at least one was timed.
        """
        timed = [[each for each in samples if each.runs] for samples in measured.values()]
        runs_s = [[run.total_s for each in samples for run in each.runs] for samples in timed if samples]
        return cls(
            RUN_FRACTION * max(elapsed_s, sum(map(sum, runs_s))),
            max(map(statistics.fmean, runs_s)),
            max(statistics.fmean(each.shape.preprocess_s for each in samples) for samples in timed if samples),
        )

    def plan(
        self, left_s: float, num_settings: int, num_samples: int, most_passes: int, ticks: CounterTicks
    ) -> WindowPlan | None:
        """The most passes whose windows are long enough; None where two are not.

        Args:
            left_s: of the budget.
            num_samples, most_passes: as many as windows have that take what they need; windows that are as exact as
                those come in the most passes, others in as many as decide, or two.
        """
        few = min(LEAST_SAMPLES, num_samples)
        usual = most_passes, num_samples, RELATIVE_ERROR
        kinds = usual, (PASSES_THAT_DECIDE, few, WORST_ERROR), (2, few, WORST_ERROR)
        for (num_passes, least, error), is_between_ticks in itertools.product(kinds, (True, False)):
            share_s = left_s / (num_passes * num_settings)
            windows, open_s, window_s = self._windows(share_s, num_samples, num_passes, ticks, is_between_ticks)
            is_short = not is_between_ticks or open_s < ticks.tick_s
            if windows.num_samples >= least and open_s <= error * window_s and is_short:
                return windows
        return None

    def _windows(
        self, share_s: float, most: int, num_passes: int, ticks: CounterTicks, is_between_ticks: bool
    ) -> tuple[WindowPlan, float, float]:
        """Windows that take so many seconds each with what is around them, what ticks leave open of each, and their
        length."""
        # It waits for half a tick at each end in the mean; what one window takes too long the others lack.
        around_s = ticks.tick_s + (WARM_AGAIN_S if is_between_ticks else 0.0)
        room_s = share_s - around_s
        fitting = (SHORT_PART if is_between_ticks else 1.0) * room_s / (self.prepare_s + self.request_s)
        num_samples = max(min(most, int(fitting)), 0)
        act_s, open_s = num_samples * self.request_s, ticks.tick_s + 2 * ticks.read_s
        if is_between_ticks:
            open_s = act_s + 2 * ticks.poll_s
        window_s = room_s - num_samples * self.prepare_s
        plan = WindowPlan(num_passes, num_samples, open_s / WORST_ERROR, around_s, is_between_ticks)
        return plan, open_s, window_s
