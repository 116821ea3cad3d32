"""In: the window in which a process measures samples of a setting; out: its load, in the journal and as keys of the
setting's file.

Counters of the driver, the host and torch's allocator are read by a thread at a low rate; nothing stands between the
marks of a run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from experiment_core_utils.meters.load_sampler import LoadSampler, memory_timeline, utilisation_of
from experiment_core_utils.primitives.errors import SettingError, Stopped
from experiment_core_utils.primitives.journal import Journal
from experiment_core_utils.primitives.records import JournalHeader, SettingLoad

SAMPLE_EVERY_S = 0.5


@contextmanager
def load_noted(sampler: LoadSampler, journal: Journal, origin: JournalHeader, with_timeline: bool) -> Iterator[None]:
    """A window of the sampler; at its end a line of the journal, also where the attempt failed or was stopped."""

    def note() -> None:
        journal.append(SettingLoad(origin.experiment_id, origin.rank, sampler.trace, with_timeline))

    try:
        with sampler:
            yield
    except (SettingError, Stopped):
        note()
        raise
    note()


def load_entries(loads: Sequence[SettingLoad]) -> dict[str, Any]:
    """The top-level keys `compute_utilisation` and `memory_timeline`, one entry for each window; see
    `docs/results_schema.md`."""
    timelines = [{**_whose(each), **memory_timeline(each.trace)} for each in loads if each.has_timeline]
    return {
        "compute_utilisation": [
            {**_whose(each), "window_s": each.trace.samples[-1].at_s, **utilisation_of(each.trace)} for each in loads
        ],
        "memory_timeline": timelines or None,
    }


def _whose(load: SettingLoad) -> dict[str, Any]:
    return {"rank": load.rank, "experiment_id": load.experiment_id}
