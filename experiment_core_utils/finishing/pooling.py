"""What the processes measured of a setting, by their journals, pooled to one whole with every sample once."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import ResultsError, ResultsNotSaved, WorkerLost
from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.primitives.statistics import mean_of
from experiment_core_utils.primitives.texts import counted
from experiment_core_utils.records.energy import AllocatedJoules, EnergyPass, EnergyPassesEnd
from experiment_core_utils.records.journal import JournalContent, journal_path, own_journals, read_end
from experiment_core_utils.records.requests import merge_memory, whole_window
from experiment_core_utils.records.run_context import RunContext
from experiment_core_utils.records.settings import (
    ArrivalsTrace,
    ConditionsReading,
    MeasuredSample,
    MeasuredSetting,
    MemoryPass,
    RoundsTrace,
    SettingLoad,
    WarmUp,
)

T = TypeVar("T")
_POLL_S = 0.05
_IDS_NAMED = 20


def part_of(content: JournalContent, rank: int, num_processes: int, experiment_id: str) -> MeasuredSetting:
    """What a journal contains; the end of an earlier run's shard says nothing about this one's."""
    end = content.end if content.end is not None and content.end.experiment_id == experiment_id else None
    readings, given = [finished.memory for finished in content.finished], content.last_header.sample_ids
    if end is not None and end.memory is not None:
        readings.append(end.memory)
    return MeasuredSetting(
        key=content.header.key,
        fingerprint=content.header.fingerprint,
        rank=rank,
        num_processes=num_processes,
        experiment_ids=content.experiment_ids,
        samples=tuple(each.measured for each in content.finished if each.measured is not None),
        failures=tuple(each.failed for each in content.finished if each.failed is not None),
        proof=end.proof if end is not None else None,
        memory=_of_passes(whole_window(readings), content.every(MemoryPass)),
        failure=end.failure if end is not None else None,
        requested_ids=given[: end.num_asked] if end is not None else None,
        num_stopped_early=int(end is not None and end.num_asked is not None and end.num_asked < len(given)),
        warmups=content.every(WarmUp),
        conditions=content.every(ConditionsReading),
        energy=content.energy,
        energy_passes=content.every(EnergyPass),
        energy_end=content.energy_end,
        loads=content.every(SettingLoad),
        rounds=content.every(RoundsTrace),
        arrivals=content.every(ArrivalsTrace),
        run_uids=content.run_uids,
    )


def shared_setting(context: RunContext, key: str) -> "SharedSetting":
    """A setting of a run, of which each process measures its shard."""
    at = context.journals, key, context.fingerprint, context.experiment_id
    return SharedSetting(*at, context.shards, context.rank)


@dataclass(frozen=True)
class SharedSetting:
    """A setting that the processes of a run measure together, each its shard of the samples."""

    folder: Path  #: of the journals
    key: str  #: the setting's
    fingerprint: str
    experiment_id: str  #: of the run
    shards: Mapping[int, Sequence[int]]  #: the samples of each process, by rank
    own_rank: int | None = None  #: of this process, which does not wait for itself; None where it measured nothing

    def own_journals(self) -> dict[int, JournalContent]:
        """The journals of the setting with this fingerprint, by rank."""
        return own_journals(self.folder, self.key, self.fingerprint)

    def parts_of(self, journals: Mapping[int, JournalContent]) -> list[MeasuredSetting]:
        """What each process measured, by its journal."""
        processes, run = len(self.shards), self.experiment_id
        return [part_of(content, rank, processes, run) for rank, content in sorted(journals.items())]

    def missing_in(self, journals: Mapping[int, JournalContent]) -> dict[int, list[int]]:
        """The samples of each process that are finished in none of these, by rank."""
        done = {finished.sample_id for content in journals.values() for finished in content.finished}
        return {rank: [each for each in shard if each not in done] for rank, shard in self.shards.items()}

    def is_at_end(self, rank: int, growth: "_Growth") -> bool:
        """Whether a process is at the end of its shard; a journal that has not grown is not read again.

        Raises:
            ResultsNotSaved: the journal was there and is not any more, or is this process's own and not at its end.
        """
        path = journal_path(self.folder, self.key, rank)
        was_there = growth.size not in (None, 0)
        if was_there and not path.exists():
            raise ResultsNotSaved(_removed_message(path))
        if not growth.note(path.stat().st_size if path.exists() else 0):
            return False
        end = read_end(path)
        if end is None or end.experiment_id != self.experiment_id:
            return False
        return end.num_given in (None, len(self.shards[rank]))


class _Growth:
    """Since when the size of something that others write has not changed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._size: object = None
        self._since_s = time.monotonic()

    @property
    def size(self) -> object:
        """The size at the last look; None before the first."""
        return self._size

    def note(self, size: object) -> bool:
        """Whether the size is another than at the last look."""
        if size == self._size:
            return False
        self._size, self._since_s = size, time.monotonic()
        return True

    @property
    def has_stopped(self) -> bool:
        """Whether it has been the same for too long."""
        return time.monotonic() - self._since_s > self._timeout_s


def collect_parts(shared: SharedSetting, timeout_s: float, stop: StopRequest) -> list[MeasuredSetting]:
    """What all journals of the setting hold, once every process has come to the end of its shard.

    An end that an earlier, shorter shard came to is not waited for any less.

    Raises:
        WorkerLost: a process that is not at its end has finished no sample for `timeout_s`.
        ResultsNotSaved: a journal was removed, or this process's own is not at its end.
        Stopped: a stop was requested while waiting.
    """
    own = shared.own_rank
    if own is not None and not shared.is_at_end(own, _Growth(timeout_s)):
        raise ResultsNotSaved(_removed_message(journal_path(shared.folder, shared.key, own)))
    waiting = {rank: _Growth(timeout_s) for rank in shared.shards}
    while waiting := {rank: each for rank, each in waiting.items() if not shared.is_at_end(rank, each)}:
        lost = sorted(rank for rank, each in waiting.items() if each.has_stopped)
        if lost:
            missing = shared.missing_in(shared.own_journals())
            raise WorkerLost(_lost_message(shared.key, timeout_s, {rank: missing[rank] for rank in lost}))
        stop.raise_if_requested(f"while waiting for process {', '.join(map(str, sorted(waiting)))}")
        time.sleep(_POLL_S)
    return shared.parts_of(shared.own_journals())


def _removed_message(path: Path) -> str:
    return (
        f"{path} was removed or cut while the run reads it; run the same command again to resume with what is left in "
        f"{path.parent}"
    )


def _lost_message(key: str, timeout_s: float, missing: Mapping[int, Sequence[int]]) -> str:
    """What each process whose rank is in `missing` has not finished."""
    named = []
    for rank, lacking in missing.items():
        ids = ", ".join(map(str, lacking[:_IDS_NAMED])) + (", ..." if len(lacking) > _IDS_NAMED else "")
        what = f"{counted(len(lacking), 'sample')} missing: {ids}" if lacking else "no sample missing"
        named.append(f"process {rank} ({what})")
    return (
        f"{key}: no sample finished within {timeout_s:g} s by {'; '.join(named)}; finished samples are saved: run the "
        f"same command again to resume (a larger --worker_timeout waits longer)"
    )


def merge_parts(parts: Sequence[MeasuredSetting], sample_ids: Sequence[int]) -> MeasuredSetting:
    """Merge the parts into one whole, samples in order of their ids.

    What each process requested must be there exactly once. Samples that an earlier run, split over another number of
    processes, finished beyond that are kept: they were drawn too.

    Args:
        sample_ids: all that were drawn; also requested, where no part says what it requested.

    Raises:
        ResultsError: a sample is missing or there twice or was never drawn, or the parts belong to different runs.
    """
    first = parts[0]
    if {(part.key, part.fingerprint) for part in parts} != {(first.key, first.fingerprint)}:
        raise ResultsError(f"the parts of {first.key} belong to different runs")
    failure = _first_known(part.failure for part in parts)
    passes = _of_all(part.energy_passes for part in parts)
    energy_end = _first_known(part.energy_end for part in parts)
    samples = sorted(_of_all(part.samples for part in parts), key=lambda sample: sample.sample_id)
    failures = sorted(_of_all(part.failures for part in parts), key=lambda item: item.sample_id)
    found = [*(item.sample_id for item in samples), *(item.sample_id for item in failures)]
    named = [part.requested_ids for part in parts if part.requested_ids is not None]
    requested = set(_of_all(named) if named else sample_ids)
    twice, missing = twice_and_missing(found, requested)
    not_drawn = sorted(set(found) - set(sample_ids))
    if failure is None and (twice or missing or not_drawn):
        raise ResultsError(f"{first.key}: samples given twice {twice}, missing {missing}, not requested {not_drawn}")
    return replace(
        first,
        rank=0,
        experiment_ids=tuple(sorted(set(_of_all(part.experiment_ids for part in parts)))),
        samples=with_pooled_energy(samples, passes, energy_end),
        failures=tuple(failures),
        proof=_first_known(part.proof for part in parts),
        memory=merge_memory([part.memory for part in parts if part.memory is not None]),
        failure=failure,
        requested_ids=tuple(sorted(requested.union(found))),
        num_stopped_early=sum(part.num_stopped_early for part in parts),
        warmups=_of_all(part.warmups for part in parts),
        conditions=_of_all(part.conditions for part in parts),
        energy=_first_known(part.energy for part in parts),
        energy_passes=passes,
        energy_end=energy_end,
        loads=_of_all(part.loads for part in parts),
        rounds=_of_all(part.rounds for part in parts),
        arrivals=_of_all(part.arrivals for part in parts),
        run_uids=tuple(sorted(set(_of_all(part.run_uids for part in parts)))),
    )


def with_pooled_energy(
    samples: Sequence[MeasuredSample], passes: Sequence[EnergyPass], end: EnergyPassesEnd | None
) -> tuple[MeasuredSample, ...]:
    """The samples, each with the mean over passes of the energy of its request; as they are without passes."""
    if not passes and end is None:
        return tuple(samples)
    found: dict[int, list[AllocatedJoules]] = {}
    for each in passes:
        for sample_id, energy in zip(each.sample_ids, each.allocated, strict=True):
            found.setdefault(sample_id, []).append(energy)
    reason = None if end is None else end.reason
    absent = AllocatedJoules(None, None, None, None, reason or "it is not among the samples whose energy is measured")
    return tuple(replace(sample, energy=_mean_allocated(found.get(sample.sample_id, [absent]))) for sample in samples)


def _mean_allocated(energies: Sequence[AllocatedJoules]) -> AllocatedJoules:
    """Mean of a sample's energies, of those by the first source and method; bounds of passes are not independent."""
    first = next((each for each in energies if each.joules is not None), energies[0])
    alike = [each for each in energies if (each.origin, each.method) == (first.origin, first.method)]
    bounds = [each.bound_j for each in alike]
    return replace(
        first,
        joules=mean_of([each.joules for each in alike]),
        bound_j=None if None in bounds else mean_of(bounds),
    )


def _first_known(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _of_all(groups: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(groups))


def _of_passes(in_rounds: MemoryReading | None, passes: Sequence[MemoryPass]) -> MemoryReading | None:
    """One process's memory of a setting: the highest peaks of its passes; those in rounds where there are none."""
    highest = merge_memory([each.memory for each in passes])
    if in_rounds is None or highest is None:
        return in_rounds
    return replace(highest, process_rss_bytes=in_rounds.process_rss_bytes, num_passes=len(passes))


def twice_and_missing(found: Sequence[int], requested: Iterable[int]) -> tuple[list[int], list[int]]:
    """What was found more than once, and what was requested and not found."""
    twice = sorted(each for each, count in Counter(found).items() if count > 1)
    return twice, sorted(set(requested).difference(found))
