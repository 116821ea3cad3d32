"""The process from which `forked_runs` are forked: it has imported all that they need, and answered a request once.

In: a line of JSON with the runs that are to run at the same time; out: a line with how each ended.
"""

import gc
import glob
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

# The drivers import these where they need them; here that is before the fork.
import experiment_core_utils.pipeline
import experiment_core_utils.planning.dry_run
import experiment_core_utils.saved_results.terminal
import experiment_core_utils.text_pipeline  # noqa: F401
import experiments.core_exp.closing_lines  # noqa: F401
from experiment_core_utils.b_model_loader import find_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.knobs.active_blocks import RunningBlocks
from experiment_core_utils.knobs.setting import Setting
from experiment_core_utils.knobs.vision_tokens import tier_target, vision_of
from experiment_core_utils.measuring.staged_runs import run_staged
from experiment_core_utils.tasks.registry import load_task
from experiments.core_exp import acc_lat_profiling, report
from experiments.text_exp import run_text_generation
from tests.processes import text_run_in_processes
from tests.processes.faults import FaultyCalls
from tests.processes.forked_runs import Run

LONGEST_S = 120.0
PROGRAMS = {
    "acc_lat_profiling.py": acc_lat_profiling.main,
    "report.py": report.main,
    "run_text_generation.py": run_text_generation.main,
    "text_run_in_processes.py": text_run_in_processes.main,
}
# The calls by which a run changes files. Of a write that is killed, half is done.
CHANGING_CALLS = ("write", "fsync", "ftruncate", "replace", "unlink", "pwrite")


def _serve(model: str) -> None:
    torch.set_num_threads(1)
    # tqdm's own lock is one for all processes: a child that is killed with it would leave the next ones waiting.
    tqdm.set_lock(threading.RLock())
    _answer_once(model)
    # What is there now is not looked at again by the children, whose copies of it would cost.
    gc.freeze()
    for line in sys.stdin:
        started = time.monotonic()
        runs = [Run(**content) for content in json.loads(line)]
        children = {_fork(run): index for index, run in enumerate(runs)}
        ended = _watch(runs, children, started)
        print(json.dumps([ended[index] for index in range(len(runs))]), flush=True)


def _answer_once(model: str) -> None:
    """What torch, transformers and the task keep after a first request is there when a child begins."""
    config = parse_config(["--model_path", model])
    staged = find_model(model).load(config.model, torch.device("cpu"))
    task = load_task("reference_vqa", "validation")
    sample = task[0]
    setting = Setting.of(
        vision=tier_target("low"), top_k=4, num_active_blocks=RunningBlocks.of(tuple(range(len(staged.decoder_blocks))))
    )
    staged.apply(setting)
    request = staged.prepare(sample, task.prompt(sample), vision_of(setting).bounds)
    run_staged(staged, staged.to_device(request.inputs), 2)


def _watch(runs: Sequence[Run], children: dict[int, int], started: float) -> dict[int, tuple[int, float]]:
    waiting = {pid: runs[index] for pid, index in children.items()}
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
        time.sleep(0.002)
    return ended


def _fork(run: Run) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(_opened(run.log), 1)
        os.dup2(1 if run.errors is None else _opened(run.errors), 2)
        os.environ.update(run.environment)
        sys.argv = [run.program, *run.arguments]
        calls = _count_calls(run)
        faults = FaultyCalls(run.watched, run.fail_at, run.fault)
        if run.watched:
            faults.install()
        if run.file_limit_bytes is not None:
            _limit_files(run.file_limit_bytes)
        code = PROGRAMS[run.program]()
        sys.stdout.flush()
        sys.stderr.flush()
        if run.calls_file is not None:
            Path(run.calls_file).write_text(str(calls()))
        if run.places_file is not None:
            Path(run.places_file).write_text(json.dumps(faults.places))
    finally:
        if sys.exc_info()[1] is not None:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            sys.stderr.flush()
        os._exit(code)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)


def _limit_files(size_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _count_calls(run: Run) -> Callable[[], int]:
    """Counts the calls that change files; what is to happen between two of them the process does itself, so that a busy
    machine cannot delay it.
    """
    count = 0
    signal_when, command_when = run.signal_when, run.command_when

    def act_once() -> None:
        nonlocal signal_when, command_when
        if signal_when is not None and glob.glob(signal_when[0]):
            number, signal_when = signal_when[1], None
            os.kill(os.getpid(), number)
        if command_when is not None and any(map(os.path.getsize, glob.glob(command_when[0]))):
            command, command_when = command_when[1], None
            subprocess.run(command, shell=True, check=True)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count - 1 != run.kill_at_call:
                returned = call(*arguments, **keywords)
                act_once()
                return returned
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
