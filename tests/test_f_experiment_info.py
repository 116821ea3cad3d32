"""What is recorded about a run, and that it is what was found."""

import json
import platform
import re
import sys
from datetime import UTC, datetime, timedelta

import pytest
import torch
from accelerate import Accelerator

from experiment_core_utils.f_experiment_info import caveats_of, describe_hardware, gather_provenance, git_commit
from experiment_core_utils.primitives.config import parse_config

CPU = torch.device("cpu")


def test_provenance_holds_every_key_and_goes_into_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["acc_lat_profiling.py", "--model_path", "a folder"])
    found = gather_provenance(Accelerator(cpu=True), CPU, "0042")
    assert list(found) == [
        "experiment_id", "timestamp", "command", "git_commit", "python", "versions", "num_processes", "hardware",
    ]  # fmt: skip
    assert found["experiment_id"] == "0042"
    assert found["command"].endswith(" acc_lat_profiling.py --model_path 'a folder'")
    assert found["num_processes"] == 1
    assert found["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert all(found["versions"].values())
    age = datetime.now(UTC) - datetime.fromisoformat(found["timestamp"])
    assert timedelta(seconds=-1) < age < timedelta(minutes=1)
    assert json.loads(json.dumps(found)) == found


def test_a_cpu_has_no_gpu_figures() -> None:
    found = describe_hardware(CPU)
    assert (found["device"], found["gpu_name"], found["gpu_memory_bytes"]) == ("cpu", None, None)
    assert found["cpu_count"] >= 1
    assert found["torch_threads"] == torch.get_num_threads()
    assert found["ram_bytes"] > 100 * 2**20
    assert set(found) == {
        "device", "gpu_name", "gpu_memory_bytes", "cuda", "num_gpus", "cpu", "cpu_count", "torch_threads", "ram_bytes",
    }  # fmt: skip


def test_the_commit_is_a_hash_that_says_whether_files_differ() -> None:
    commit = git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(\+changes)?", commit)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit() is None


def test_data_of_the_hub_whose_commit_is_not_known_is_a_caveat() -> None:
    config = parse_config([])
    for source, caveats in (
        ({"read_from": "generated scenes"}, 0),
        ({"read_from": "hub", "revision": "a" * 40}, 0),
        ({"read_from": "hub", "revision": "unknown"}, 1),
    ):
        assert len(caveats_of(config, CPU, 1, source)) == caveats
