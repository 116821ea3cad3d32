"""Real runs of the driver as processes of their own, forked from a server that has paid for the imports once.

Each can be killed (SIGKILL) after a time, or at its n-th call that changes a file, and signalled while it runs.
"""

import glob
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

from experiment_core_utils.b_model_loader import find_model, load_staged_model
from experiment_core_utils.primitives.config import parse_config
from experiment_core_utils.tasks.registry import load_task
from experiments.core_exp.acc_lat_profiling import main

REPOSITORY = Path(__file__).resolve().parents[1]
KILLED = -signal.SIGKILL
# The calls by which a run changes files. Of a write that is killed, half is done.
LONGEST_S = 120.0
CHANGING_CALLS = ("write", "fsync", "ftruncate", "replace", "unlink", "pwrite")


@dataclass(frozen=True)
class Run:
    """One process of a run.

    Attributes:
        arguments: of the driver.
        environment: added to this process's.
        kill_after_s: SIGKILL after that time, counted from the fork.
        kill_at_call: SIGKILL at the n-th changing call, from 0.
        signal_when: (pattern of paths, number): that signal is sent as soon as a path fits the pattern.
        file_limit_bytes: no file can grow beyond that: what a full disk is to a program.
        calls_file: where the number of changing calls goes at the end of the process.
    """

    arguments: Sequence[str]
    log: str
    environment: Mapping[str, str] = field(default_factory=dict)
    kill_after_s: float | None = None
    kill_at_call: int | None = None
    signal_when: tuple[str, int] | None = None
    file_limit_bytes: int | None = None
    calls_file: str | None = None


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
            [sys.executable, "-m", "tests.forked_runs", str(self._model)],
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


# --- the server ---------------------------------------------------------------------------------------------------


def _serve(model: str) -> None:
    torch.set_num_threads(1)
    # tqdm's own lock is one for all processes: a child that is killed with it would leave the next ones waiting.
    tqdm.set_lock(threading.RLock())
    load_staged_model(parse_config(["--model_path", model]), find_model(model), torch.device("cpu"))
    load_task("reference_vqa", "validation")[0]
    for line in sys.stdin:
        started = time.monotonic()
        runs = [Run(**content) for content in json.loads(line)]
        children = {_fork(run): index for index, run in enumerate(runs)}
        ended = _watch(runs, children, started)
        print(json.dumps([ended[index] for index in range(len(runs))]), flush=True)


def _watch(runs: Sequence[Run], children: dict[int, int], started: float) -> dict[int, tuple[int, float]]:
    waiting = {pid: runs[index] for pid, index in children.items()}
    signalled = set()
    ended: dict[int, tuple[int, float]] = {}
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        gone_s = time.monotonic() - started
        if pid:
            ended[children[pid]] = (os.waitstatus_to_exitcode(status), gone_s)
            del waiting[pid]
        for each, run in waiting.items():
            if gone_s > (LONGEST_S if run.kill_after_s is None else run.kill_after_s):
                os.kill(each, signal.SIGKILL)
            elif run.signal_when is not None and each not in signalled and glob.glob(run.signal_when[0]):
                os.kill(each, run.signal_when[1])
                signalled.add(each)
        time.sleep(0.002)
    return ended


def _fork(run: Run) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(run.environment)
        sys.argv = ["acc_lat_profiling.py", *run.arguments]
        calls = _count_calls(run.kill_at_call)
        if run.file_limit_bytes is not None:
            _limit_files(run.file_limit_bytes)
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        if run.calls_file is not None:
            Path(run.calls_file).write_text(str(calls()))
    finally:
        if sys.exc_info()[1] is not None:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            sys.stderr.flush()
        os._exit(code)


def _limit_files(size_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _count_calls(kill_at: int | None) -> Callable[[], int]:
    count = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 != kill_at:
                return call(*arguments, **keywords)
            if name == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif count % 2:
                call(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in CHANGING_CALLS:
        setattr(os, name, counted(name, getattr(os, name)))
    return lambda: count


if __name__ == "__main__":
    _serve(sys.argv[1])
