"""The place of a process in a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiment_core_utils.primitives.interruption import StopRequest
from experiment_core_utils.records.ledger import Ledger


@dataclass(frozen=True)
class RunContext:
    """The place of this process in a run, and where the run keeps what it has measured."""

    experiment_id: str
    rank: int
    #: the samples of each process, by rank, in the order in which they are measured
    shards: Mapping[int, tuple[int, ...]]
    ledger: Ledger
    journals: Path  #: folder of the journals of all processes
    stop: StopRequest  #: looked at before every sample
    #: ids of the other processes on this machine; None where some cannot be seen
    other_pids: tuple[int, ...] | None = ()
    run_uid: str | None = None  #: as in `Provenance`

    @property
    def is_main(self) -> bool:
        """Whether this process pools, saves and reports."""
        return self.rank == 0

    @property
    def num_processes(self) -> int:
        """How many processes measure the run."""
        return len(self.shards)

    @property
    def own_ids(self) -> tuple[int, ...]:
        """The samples of this process."""
        return self.shards[self.rank]

    @property
    def fingerprint(self) -> str:
        """What the results and journals of the run are recognised by."""
        return self.ledger.fingerprint
