"""What two sides of a comparison share: the same samples at the same settings in every run of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from experiment_core_utils.primitives.errors import ResultsError
from experiment_core_utils.records.sample_result import SampleResult, is_same_question
from experiment_core_utils.records.setting_result import SettingResult
from experiments.analyses.knobs.grid import picture_of
from experiments.analyses.sweeps import Sweep


@dataclass(frozen=True)
class Cells:
    """A quantity of C samples at their settings in the R and R' runs of two sides."""

    one: np.ndarray  #: [R, C]
    other: np.ndarray  #: [R', C]
    places: np.ndarray  #: [C] number of the setting
    samples: np.ndarray  #: [C] id of the sample in its task
    pictures: np.ndarray  #: [C] number of the picture

    def where(self, kept: np.ndarray) -> "Cells":
        """Those of which [C] bools are true."""
        pictures = np.unique(self.pictures[kept], return_inverse=True)[1]
        return Cells(self.one[:, kept], self.other[:, kept], self.places[kept], self.samples[kept], pictures)

    def at(self, place: int) -> "Cells":
        """Those of a setting."""
        return self.where(self.places == place)

    @property
    def change(self) -> np.ndarray:
        """[C], `other` - `one`, each the mean over runs."""
        return np.asarray(self.other.mean(axis=0) - self.one.mean(axis=0))

    @property
    def num_pictures(self) -> int:
        """The number of pictures."""
        return len(np.unique(self.pictures))

    @property
    def numbers(self) -> list[int]:
        """The settings, each once."""
        return [int(each) for each in np.unique(self.places)]


def with_common_samples(cells: Sequence[Cells]) -> list[Cells]:
    """Each setting's cells of one task, without samples that another of the settings lacks."""
    common = reduce(np.intersect1d, [each.samples for each in cells])
    return [each.where(np.isin(each.samples, common)) for each in cells]


class SharedSamples:
    """The settings that all runs of two sides have, and the samples of each that all have."""

    def __init__(self, first: Sequence[Sweep], second: Sequence[Sweep]) -> None:
        """Find them; where no setting is in all runs, the models as they are (a server's has no blocks in its key).

        Raises:
            ResultsError: no setting, or no question, is in all runs, or a task is scored by two metrics.
        """
        self.num_first = len(first)
        runs = (*first, *second)
        found = [{(setting.task, setting.key): setting.result for setting in run.settings} for run in runs]
        if not set.intersection(*map(set, found)):
            found = [
                {(each.task, "reference"): each.result for each in run.settings if each.result.is_reference}
                for run in runs
            ]
        #: task and key of each setting
        self.places = [place for place in found[0] if all(place in run for run in found)]
        if not self.places:
            raise ResultsError("the runs have no setting of one task in common; give runs of the same task and knobs")
        #: of each run, the results of these settings
        self.runs: list[list[SettingResult]] = [[run[place] for place in self.places] for run in found]
        for (task, _), results in zip(self.places, zip(*self.runs, strict=True), strict=True):
            metrics = {result.metric for result in results}
            if len(metrics) > 1:
                raise ResultsError(f"{task} is scored by {' and by '.join(sorted(metrics))}; rescore one run")
        #: of each setting, a row for each sample: what it is in every run
        self._samples = [_common(results) for results in zip(*self.runs, strict=True)]
        if not any(self._samples):
            raise ResultsError("the runs share no question; measure the same samples of the same data in all")

    @cached_property
    def in_part(self) -> frozenset[int]:
        """Numbers of the settings of which some run has a sample that is not shared."""
        rows = zip(self._samples, zip(*self.runs, strict=True), strict=True)
        return frozenset(
            number
            for number, (samples, results) in enumerate(rows)
            if any(len(result.per_sample_results) > len(samples) for result in results)
        )

    @property
    def num_samples(self) -> tuple[int, int, int]:
        """Samples that the first side has in any of the settings, that the second has, and that are shared."""
        own = [
            {(task, sample.sample_id) for (task, _), each in zip(self.places, run, strict=True)
             for sample in each.per_sample_results}
            for run in self.runs
        ]  # fmt: skip
        shared = {
            (task, row[0].sample_id)
            for (task, _), samples in zip(self.places, self._samples, strict=True)
            for row in samples
        }
        first, second = (set[tuple[str, int]]().union(*each) for each in (own[: self.num_first], own[self.num_first :]))
        return len(first), len(second), len(shared)

    @property
    def is_one_run_a_side(self) -> bool:
        """Whether neither side has two runs."""
        return len(self.runs) == 2

    @cached_property
    def is_identical(self) -> bool:
        """Whether every sample is the same in all runs, times included: they are one measurement."""
        return all(each == row[0] for samples in self._samples for row in samples for each in row[1:])

    @property
    def is_blocked(self) -> bool:
        """Whether a run measured one setting after another."""
        orders = [result.setting_order for run in self.runs for result in run]
        return any(order is None or order.how != "rounds" for order in orders)

    @property
    def waited_for_each_other(self) -> bool:
        """Whether the requests of a run arrived at a rate, so that its samples are not independent."""
        return any(result.open_loop is not None for run in self.runs for result in run)

    @property
    def results(self) -> list[SettingResult]:
        """The shared settings' results of all runs."""
        return [result for run in self.runs for result in run]

    def passes_of(self, number: int) -> list[list[float]]:
        """Of a setting the energy of a request in each pass, of each run; none where a run has fewer than two."""
        energies = [run[number].energy for run in self.runs]
        found = [[] if each is None or each.passes is None else each.passes.j_per_request_by_pass for each in energies]
        return found if all(len(own) > 1 for own in found) else []

    def has_one_answer(self, number: int) -> bool:
        """Whether every shared sample of a setting has one answer and one score in all runs."""
        return all(
            (each.pred, each.answer, each.accuracy) == (row[0].pred, row[0].answer, row[0].accuracy)
            for row in self._samples[number]
            for each in row[1:]
        )

    def cells(self, read: Callable[[SampleResult], float | None]) -> Cells | None:
        """The values of all samples that have one in every run; None for none."""
        rows, places, ids, pictures = [], [], [], []
        for number, samples in enumerate(self._samples):
            for each in samples:
                known = [value for sample in each if (value := read(sample)) is not None]
                if len(known) == len(each):
                    rows.append(known)
                    places.append(number)
                    ids.append(each[0].sample_id)
                    pictures.append(f"{self.places[number][0]} {picture_of(each[0])}")
        return self._split(rows, places, ids, pictures) if rows else None

    def memory(self) -> Cells | None:
        """Logs of the bytes of each setting: the peak on a GPU where all runs have it, else what formulas give.

        They are of the largest of all samples of a run: those of the settings `in_part` say nothing of a change.
        """
        for name in ("peak_memory_bytes", "counted_memory_bytes"):
            of_settings = [[getattr(each.memory, name, None) for each in row] for row in zip(*self.runs, strict=True)]
            known = [number for number, values in enumerate(of_settings) if all(values)]
            if known:
                rows = [[float(np.log(value)) for value in of_settings[number] if value] for number in known]
                return self._split(rows, known, known, list(map(str, known)))
        return None

    def _split(
        self, rows: Sequence[Sequence[float]], places: Sequence[int], ids: Sequence[int], pictures: Sequence[str]
    ) -> Cells:
        values, numbers = np.array(rows).T, np.unique(pictures, return_inverse=True)[1]
        return Cells(values[: self.num_first], values[self.num_first :], np.array(places), np.array(ids), numbers)


def _common(results: Sequence[SettingResult]) -> list[list[SampleResult]]:
    """A row for each sample that is in all results with one question: what it is in each."""
    by_id = [{sample.sample_id: sample for sample in result.per_sample_results} for result in results]
    every = [[each.get(sample_id) for each in by_id] for sample_id in sorted(by_id[0])]
    return [
        known
        for row in every
        if len(known := [each for each in row if each is not None]) == len(row)
        and all(is_same_question(known[0], each) for each in known[1:])
    ]
