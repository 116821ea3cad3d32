"""OMP_NUM_THREADS counts where somebody set it, and a launcher is nobody."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiment_core_utils.primitives.cpu_threads import available_cpus, cpu_quota, environment_threads
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.files import REPOSITORY


@pytest.mark.parametrize("given", ["0", "many", "-2", "1.5"])
def test_what_is_no_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    with pytest.raises(
        ConfigurationError, match=f"^OMP_NUM_THREADS={given} is not a number of threads; give 1 or more"
    ):
        environment_threads()


@pytest.mark.parametrize(("given", "counts"), [(None, "None"), ("3", "3")])
def test_a_launchers_one_thread_is_nobodys_wish(given: str | None, counts: str) -> None:
    """The shell stands for a launcher: it sets what `torchrun` sets for the processes that it starts."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if given is not None:
        environment["OMP_NUM_THREADS"] = given
    code = "from experiment_core_utils.primitives.cpu_threads import environment_threads as f; print(f())"
    started = f"TORCHELASTIC_RUN_ID=none OMP_NUM_THREADS={given or 1} {sys.executable} -c '{code}'; exit $?"
    printed = subprocess.run(
        ["bash", "-c", started], env=environment, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == counts


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "200000\n"}, 0.25),
    ],
)
def test_the_quota_of_a_control_group_bounds_the_cpus(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota
    allowed = len(os.sched_getaffinity(0))
    assert available_cpus(tmp_path) == (allowed if quota is None else min(allowed, {2.5: 2, 0.25: 1}[quota]))
