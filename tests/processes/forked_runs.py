"""Real runs of the drivers as processes of their own, forked from a server that has paid for the imports once.

Each can be killed (SIGKILL) after a time, or at its n-th call that changes a file, and signalled while it runs.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
# The environment of one of two processes, less its RANK: each takes itself for the only one of its machine.
TWO_PROCESSES = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
}


def of_rank(rank: int, port: int) -> dict[str, str]:
    """The environment of one of two processes of one machine, as torchrun sets it."""
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    return TWO_PROCESSES | places


@dataclass(frozen=True)
class Run:
    """One process of a run.

    Attributes:
        arguments: of the driver.
        log: the file for what it prints.
        environment: added to this process's.
        kill_after_s: SIGKILL after that time, counted from the fork.
        kill_at_call: SIGKILL at the n-th changing call, from 0.
        signal_when: (pattern of paths, number): the process gets that signal after the changing call that made a
            path of that pattern.
        command_when: (pattern of paths, shell command): the command runs, and the process waits for its end, after the
            changing call that made a file of that pattern that is not empty.
        file_limit_bytes: no file can grow beyond that: what a full disk is to a program.
        calls_file: where the number of changing calls goes at the end of the process.
        program: the name of the driver.
        errors: the file for its standard error; None puts it into the log too.
        watched: folders whose files' calls are counted by `FaultyCalls`.
        fail_at, fault: which of these calls fails, and how; None for none.
        places_file: where kind and path of these calls go at the end of the process, as JSON.
    """

    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    kill_after_s: float | None = None
    kill_at_call: int | None = None
    signal_when: tuple[str, int] | None = None
    command_when: tuple[str, str] | None = None
    file_limit_bytes: int | None = None
    calls_file: str | None = None
    program: str = "acc_lat_profiling.py"
    errors: str | None = None
    watched: Sequence[str] = ()
    fail_at: int | None = None
    fault: str = "kill"
    places_file: str | None = None


@dataclass(frozen=True)
class Ended:
    """How it ended: exit code, negative for a signal; and how long it lasted."""

    code: int
    seconds: float


class RunServer:
    """Starts the server and talks to it.

    Args:
        model: the server loads it once beforehand, so that what transformers and the task keep is paid for once.
    """

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> "RunServer":
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.forked_runs_server", str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def run(self, *runs: Run) -> list[Ended]:
        """Run all at the same time; returns when all have ended, in their order."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps([asdict(run) for run in runs]), file=self._server.stdin, flush=True)
        return [Ended(*ended) for ended in json.loads(self._server.stdout.readline())]
