"""In: the window in which a process measures samples of a setting; out: its load, a line of the journal.

Counters of the driver, the host and torch's allocator are read by a thread at a low rate; nothing stands between the
marks of a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from experiment_core_utils.meters.load_sampler import LoadSampler
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
