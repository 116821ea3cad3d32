"""In: every process's part of a setting; out: one whole in which each sample is there exactly once."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from experiment_core_utils.j_results_saving import write_text_atomically
from experiment_core_utils.primitives.device import MemoryReading
from experiment_core_utils.primitives.errors import ResultsError, WorkerLost
from experiment_core_utils.primitives.records import MeasuredSetting

_PART = TypeAdapter(MeasuredSetting)
_POLL_S = 0.05


def part_path(folder: Path, key: str, rank: int) -> Path:
    """Where a process leaves its part of a setting."""
    return folder / f"{key}.rank{rank}.json"


def save_part(part: MeasuredSetting, folder: Path) -> None:
    """Write one process's part, whole or not at all."""
    write_text_atomically(_PART.dump_json(part).decode(), part_path(folder, part.key, part.rank))


def read_part(path: Path) -> MeasuredSetting:
    """Read a part; raises ResultsError where the file is of another schema."""
    try:
        return _PART.validate_json(path.read_text())
    except ValidationError as error:
        raise ResultsError(f"{path} is not a part of this version's schema: {error.errors()[0]['msg']}") from error


def collect_parts(
    folder: Path, key: str, fingerprint: str, num_processes: int, timeout_s: float
) -> list[MeasuredSetting]:
    """The parts of all processes, waiting for those that are not there yet; parts of other runs do not count.

    Raises:
        WorkerLost: a part is not there after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[int, MeasuredSetting] = {}
    while len(found) < num_processes:
        for rank in set(range(num_processes)) - set(found):
            path = part_path(folder, key, rank)
            if path.exists():
                part = read_part(path)
                if (part.fingerprint, part.num_processes) == (fingerprint, num_processes):
                    found[rank] = part
        if len(found) < num_processes:
            if time.monotonic() > deadline:
                missing = sorted(set(range(num_processes)) - set(found))
                raise WorkerLost(f"processes {missing} left no part of {key} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
    return [found[rank] for rank in range(num_processes)]


def remove_part(folder: Path, key: str, rank: int) -> None:
    """Remove a part: its setting is saved as a whole, or it is left over from a run that was killed."""
    part_path(folder, key, rank).unlink(missing_ok=True)


def merge_parts(parts: Sequence[MeasuredSetting], sample_ids: Sequence[int]) -> MeasuredSetting:
    """One whole, samples in order of their ids.

    Raises:
        ResultsError: a sample is missing or there twice, or the parts belong to different runs.
    """
    first = parts[0]
    if {(part.key, part.fingerprint) for part in parts} != {(first.key, first.fingerprint)}:
        raise ResultsError(f"the parts of {first.key} belong to different runs")
    failure = next((part.failure for part in parts if part.failure is not None), None)
    samples = sorted((sample for part in parts for sample in part.samples), key=lambda sample: sample.sample_id)
    failures = sorted((item for part in parts for item in part.failures), key=lambda item: item.sample_id)
    if failure is None:
        _check_complete(
            [*(item.sample_id for item in samples), *(item.sample_id for item in failures)], sample_ids, first.key
        )
    return MeasuredSetting(
        key=first.key,
        fingerprint=first.fingerprint,
        rank=0,
        num_processes=len(parts),
        samples=tuple(samples),
        failures=tuple(failures),
        proof=next((part.proof for part in parts if part.proof is not None), None),
        memory=merge_memory([part.memory for part in parts if part.memory is not None]),
        failure=failure,
    )


def merge_memory(readings: Sequence[MemoryReading]) -> MemoryReading | None:
    """The largest of each figure over processes: what one of them needs."""
    if not readings:
        return None
    peaks = [reading.peak_memory_bytes for reading in readings if reading.peak_memory_bytes is not None]
    reserved = [reading.peak_reserved_bytes for reading in readings if reading.peak_reserved_bytes is not None]
    return MemoryReading(
        peak_memory_bytes=max(peaks) if peaks else None,
        peak_reserved_bytes=max(reserved) if reserved else None,
        process_rss_bytes=max(reading.process_rss_bytes for reading in readings),
        reason=readings[0].reason,
    )


def _check_complete(found: Sequence[int], wanted: Sequence[int], key: str) -> None:
    counts = Counter(found)
    twice = [sample_id for sample_id, count in counts.items() if count > 1]
    missing = sorted(set(wanted) - set(found))
    foreign = sorted(set(found) - set(wanted))
    if twice or missing or foreign:
        raise ResultsError(f"{key}: samples there twice {twice}, missing {missing}, not asked for {foreign}")
