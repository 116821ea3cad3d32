"""In: one process's samples of a setting and those finished; out: the next to measure, until there are enough."""

from collections.abc import Iterator, Mapping, Sequence

from experiment_core_utils.primitives.records import FinishedSample
from experiment_core_utils.primitives.stability import PrecisionGoal


class Share:
    """The ids of one process's samples, in order, and those that are finished.

    Whether there are enough is judged in that order, before each id, by the samples in front of it alone. So a run that
    was killed and goes on stops at the same id.

    Args:
        finished: samples by id; those of other processes are left out.
        goal: None where every sample is asked for.
    """

    def __init__(
        self, sample_ids: Sequence[int], finished: Mapping[int, FinishedSample], goal: PrecisionGoal | None
    ) -> None:
        self.sample_ids = tuple(sample_ids)
        self.finished = {each: finished[each] for each in self.sample_ids if each in finished}
        self._goal = goal

    def add(self, sample: FinishedSample) -> None:
        """One more is finished."""
        self.finished[sample.sample_id] = sample

    def until_enough(self) -> Iterator[int]:
        """The ids from the first on, finished ones too; ends where those in front of the next one are enough."""
        totals_s: list[float] = []
        pictures: list[str] = []
        for sample_id in self.sample_ids:
            if self._goal is not None and self._goal.is_reached(totals_s, pictures):
                return
            yield sample_id
            done = self.finished.get(sample_id)
            if done is not None and done.measured is not None and done.measured.run is not None:
                totals_s.append(done.measured.run.total_s)
                pictures.append(done.measured.image_id)

    @property
    def num_finished(self) -> int:
        """How many of its samples are finished."""
        return len(self.finished)

    @property
    def num_asked(self) -> int:
        """How many ids from the front are asked for, as far as the finished samples tell."""
        if self._goal is None:
            return len(self.sample_ids)
        return sum(1 for _ in self.until_enough())

    @property
    def is_done(self) -> bool:
        """Whether all that is asked for is finished."""
        return all(each in self.finished for each in self.sample_ids[: self.num_asked])
