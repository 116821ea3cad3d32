"""Marks by the host's clock, windows of memory, errors of memory and the choice of a device, without a GPU."""

import os
import resource
import time
from pathlib import Path

import psutil
import pytest
import torch

from experiment_core_utils.primitives import device
from experiment_core_utils.primitives.device import (
    CudaMarks,
    HostMarks,
    MemoryWindow,
    NoMarks,
    choose_device,
    choose_dtype,
    free_memory_bytes,
    most_memory_bytes,
    new_marks,
    out_of_memory_named,
    refuse_unfit_host,
    release_cached_memory,
    set_cpu_threads,
    synchronize,
)
from experiment_core_utils.primitives.errors import ConfigurationError, OutOfMemory, SettingError

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")


def test_spans_lie_between_neighbouring_marks() -> None:
    marks = HostMarks()
    assert marks.seconds() == []
    before_the_first = time.perf_counter()
    marks.mark()
    after_the_first = time.perf_counter()
    assert marks.seconds() == []
    for pause in (0.02, 0.0, 0.01):
        time.sleep(pause)
        before_the_last = time.perf_counter()
        marks.mark()
    after_the_last = time.perf_counter()
    spans = marks.seconds()
    assert len(spans) == 3
    assert spans[0] >= 0.02 and spans[1] >= 0.0 and spans[2] >= 0.01
    # However long the host holds the test up between two lines; a nanosecond for what floats round off.
    assert before_the_last - after_the_first - 1e-9 <= sum(spans) <= after_the_last - before_the_first + 1e-9
    assert marks.seconds() == spans


def test_no_marks_measure_nothing() -> None:
    marks = NoMarks()
    marks.mark()
    marks.mark()
    assert marks.seconds() == []


def test_before_the_first_mark_a_gpu_has_nothing_to_do() -> None:
    assert CudaMarks().newest_is_reached()


def test_the_cpu_is_marked_by_the_host() -> None:
    assert isinstance(new_marks(CPU), HostMarks)
    # Work on a CPU is finished when a call returns, wherever else it went on.
    assert isinstance(new_marks(CPU, CPU), HostMarks)
    synchronize(CPU, CPU)
    release_cached_memory(CPU)


def test_what_is_free_is_a_part_of_what_there_is() -> None:
    assert 0 < free_memory_bytes(CPU) <= most_memory_bytes(CPU)


def test_a_window_on_the_cpu_has_no_peak_and_says_why() -> None:
    with MemoryWindow(CPU) as window:
        assert window.reading is None
        torch.zeros(1000)
    assert window.reading is not None
    assert (window.reading.peak_memory_bytes, window.reading.peak_reserved_bytes) == (None, None)
    assert window.reading.reason == "no CUDA device: torch keeps no high-water mark on the CPU"
    assert window.reading.process_rss_bytes > 10 * 2**20


def fail_for_lack_of_memory() -> None:
    with out_of_memory_named():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total ... See docs")


def test_the_hosts_lack_of_memory_has_the_same_name() -> None:
    with pytest.raises(OutOfMemory, match="^DefaultCPUAllocator: can't allocate memory"), out_of_memory_named():
        torch.empty(1 << 50, dtype=torch.uint8)
    for error in (MemoryError("std::bad_alloc"), RuntimeError("std::bad_alloc"), MemoryError()):
        with pytest.raises(OutOfMemory, match="the host has no memory left for this"), out_of_memory_named():
            raise error
    with pytest.raises(OutOfMemory), out_of_memory_named():
        bytearray(1 << 60)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), out_of_memory_named():
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_lack_of_memory_gets_its_name_and_keeps_its_cause() -> None:
    with pytest.raises(OutOfMemory) as caught:
        fail_for_lack_of_memory()
    assert str(caught.value) == "CUDA out of memory"
    assert isinstance(caught.value, SettingError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_window_that_ends_in_lack_of_memory_still_has_its_reading() -> None:
    window = MemoryWindow(CPU)
    with pytest.raises(OutOfMemory), window:
        fail_for_lack_of_memory()
    assert window.reading is not None


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("CUDA out of memory")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, out_of_memory_named():
        raise error
    assert caught.value is error


@without_gpu
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert choose_device("auto") == choose_device("cpu", local_rank=3) == CPU
    with pytest.raises(ConfigurationError, match="--device cuda was given but torch sees no GPU"):
        choose_device("cuda")


def test_cores_are_shared_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        set_cpu_threads(1, 1)
        assert torch.get_num_threads() == 1
        set_cpu_threads(None, 1)
        assert torch.get_num_threads() == cores
        set_cpu_threads(None, cores + 1)
        assert torch.get_num_threads() == 1
        set_cpu_threads(3, 8)
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "1,4")
        set_cpu_threads(None, 1)
        assert torch.get_num_threads() == 1
        set_cpu_threads(3, 1)
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores + 1))
        set_cpu_threads(None, 1)
        assert torch.get_num_threads() == cores
    finally:
        torch.set_num_threads(before)


def test_free_memory_is_within_the_limit_of_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    free = psutil.virtual_memory().available
    assert device.available_memory_bytes() == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert device.available_memory_bytes() == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("1700\n")
    assert device.available_memory_bytes() == 1700 - 1000
    (tmp_path / "memory.max").write_text("900\n")
    assert device.available_memory_bytes() == 0


def test_free_memory_is_what_the_process_may_still_map() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, limits[1]))
        # Other threads may map or give back some in the meantime.
        assert device.available_memory_bytes() == pytest.approx(2**28, rel=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_auto_is_float32_on_the_cpu_and_bfloat16_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert (choose_dtype("auto", cpu), choose_dtype("auto", gpu)) == (torch.float32, torch.bfloat16)
    assert (choose_dtype("float16", cpu), choose_dtype("float32", gpu)) == (torch.float16, torch.float32)
    assert choose_dtype("float8", gpu) == torch.bfloat16


def test_cores_are_those_of_all_processes_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This process is pinned beside the first of two others, and the second one stands alone.
    pinned = {0: {4, 6}, 71: {6}, 80: {1}}
    monkeypatch.setattr(device.os, "sched_getaffinity", pinned.__getitem__)
    monkeypatch.setattr(device.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    found = [device.usable_cores(), device.usable_cores((80, 71)), device.usable_cores(None)]
    assert found == [2, 3, 16]
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert device.usable_cores((80, 71)) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert device.usable_cores((71,)) == 2


def test_a_host_that_would_end_a_run_late_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unfit_host()
    with pytest.raises(ConfigurationError, match=f"^{tmp_path} is not there, and shows memory and load; mount it"):
        refuse_unfit_host(tmp_path)
    with pytest.raises(ConfigurationError, match="^the clock of this machine says 1969-12-31, which dates files and"):
        refuse_unfit_host(now_unix_s=-60.0)
    vms = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (vms + 100_000_000, vms + 100_000_000))
    with pytest.raises(ConfigurationError, match="MB of memory are left for this process, and a run needs at least"):
        refuse_unfit_host()
