"""When conditions are read, and from where, with scripted meters and clock."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from experiment_core_utils.meters.load import ConditionsMeter, conditions_meter, cpu_now
from experiment_core_utils.records.settings import CpuReading

CPU = CpuReading(1.0, 2.0, 0.5, None)


def test_between_samples_it_reads_every_ten_seconds() -> None:
    now = [0.0]
    meter = ConditionsMeter("0007", 1, None, "no GPU is used", lambda: CPU, lambda: now[0])
    opened = meter.read("open")
    assert (opened.experiment_id, opened.rank, opened.when, opened.gpu_reason) == ("0007", 1, "open", "no GPU is used")
    assert (opened.cpu, opened.gpu, opened.monotonic_s) == (CPU, None, 0.0)
    read_at = []
    for second in range(1, 26):
        now[0] = float(second)
        if (reading := meter.read_if_due()) is not None:
            assert reading.when == "between"
            read_at.append(second)
    assert read_at == [10, 20]


def test_on_the_cpu_there_is_no_gpu_to_read() -> None:
    reading = conditions_meter("0007", 0, torch.device("cpu")).read("open")
    assert (reading.gpu, reading.gpu_reason) == (None, "no GPU is used")


def test_the_cpus_times_are_the_hosts_and_this_processs() -> None:
    before = cpu_now()
    started = os.times()
    while (used := sum(os.times()[:2]) - sum(started[:2])) < 0.2:
        pass
    after = cpu_now()
    assert after.own_s - before.own_s == pytest.approx(used, abs=0.1)
    # Where every CPU was busy the two are equal but for rounding.
    assert after.total_s - before.total_s >= after.busy_s - before.busy_s - 1e-6 >= -1e-6
    # The clock of all logical CPUs: at least what one of them did in that time.
    assert after.total_s - before.total_s > 0.1
    assert before.total_s > 0.0 and psutil.cpu_count() is not None


# A process that starts another; each says so when it has used 0.2 s of a CPU, and ends when its input does.
_BUSY = """
import os, subprocess, sys
def work():
    while sum(os.times()[:2]) < 0.2:
        pass
if sys.argv[1] == "inner":
    work()
    print("done", flush=True)
    sys.stdin.read()
else:
    inner = subprocess.Popen([sys.executable, "-c", sys.argv[2], "inner", ""], stdin=subprocess.PIPE)
    work()
    print("done", flush=True)
    sys.stdin.read()
    inner.communicate()
"""


def test_the_own_time_has_that_of_descendants_while_they_run_and_when_they_have_ended() -> None:
    before = cpu_now().own_s
    child = subprocess.Popen(
        [sys.executable, "-c", _BUSY, "outer", _BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(2)] == ["done\n"] * 2
    running = cpu_now().own_s
    # 0.2 s of the child and of its child, which are both there; times are counted in hundredths of a second.
    assert running - before >= 0.38
    child.communicate()
    assert child.returncode == 0
    # Both were waited for, and their time is kept.
    assert cpu_now().own_s >= running - 0.04


def test_processes_that_work_for_this_one_are_its_own_and_count_once() -> None:
    """This process is named again, beside one that is gone; its parent has it among its own."""
    alone = cpu_now().own_s
    named = cpu_now((os.getpid(), 2**22 + 1)).own_s
    assert 0 < alone <= named < 2 * alone
    assert cpu_now((os.getppid(),)).own_s >= named
