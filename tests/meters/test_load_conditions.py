"""When conditions are read, and from where, with scripted meters and clock."""

import os

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
