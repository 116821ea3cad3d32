"""Whose energy is a server's: real processes that listen, on GPUs of a scripted driver."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pynvml
import pytest
import torch

from experiment_core_utils.b_model_loader import find_requested_model
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.d_energy_tracking import meters_of
from experiment_core_utils.meters.requested_energy import energy_gpus
from experiment_core_utils.models.source import ModelSource
from experiment_core_utils.planning.run import unseen_in_server_caveats
from experiment_core_utils.primitives.errors import EnergyRefused, MeterUnavailable
from tests.meters.nvml.scripted_nvml import ScriptedEnergyNvml

# A server whose model is in a child, and nobody's GPU process.
_LISTENER = """
import socket, subprocess, sys
found = socket.socket()
found.bind(("127.0.0.1", 0))
found.listen()
with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
    print(found.getsockname()[1], child.pid, flush=True)
    input()
"""


@dataclass(frozen=True)
class Listener:
    """A server: its port, its id and its child's."""

    port: int
    pid: int
    child: int


@pytest.fixture
def servers() -> Iterator[list[Listener]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        found = [stack.enter_context(subprocess.Popen([sys.executable, "-c", _LISTENER], **pipes)) for _ in range(2)]
        lines = [each.stdout.readline().split() for each in found if each.stdout is not None]
        yield [Listener(int(port), each.pid, int(child)) for each, (port, child) in zip(found, lines, strict=True)]
        for each in found:
            each.communicate("\n")


@pytest.fixture(autouse=True)
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def source_of(*servers: Listener) -> ModelSource:
    urls = [f"s{at}=http://127.0.0.1:{each.port}/v1" for at, each in enumerate(servers)]
    return find_requested_model(parse_config(["--endpoint", *urls, "--model", "m"]))


def test_the_gpus_are_those_of_the_server_and_its_descendants(servers: list[Listener]) -> None:
    one, other = servers
    computing = {"GPU-a": [7], "GPU-c": [one.child], "GPU-b": [one.pid, os.getpid()], "GPU-d": []}
    nvml = ScriptedEnergyNvml(processes=computing)
    assert energy_gpus(source_of(one), nvml) == ("GPU-b", "GPU-c")
    # Two servers on one GPU: what the other draws while it waits is part of what each needs.
    nvml = ScriptedEnergyNvml(processes={"GPU-a": [other.child, one.child]})
    assert energy_gpus(source_of(one, other), nvml) == ("GPU-a",)
    assert energy_gpus(find_requested_model(parse_config([])), nvml) is None


Driver = Callable[[Listener, Listener], dict[str, list[int]]]
UNKNOWN: dict[str, tuple[Driver, str]] = {
    "another container": (lambda one, _: {"GPU-a": [7]}, "the driver lists no process of the server on a GPU"),
    "others": (lambda one, _: {"GPU-a": [one.pid, 7, 8]}, r"compute on the server's GPUs, too \(7, 8\)"),
    "several": (lambda one, other: {"GPU-a": [one.pid], "GPU-b": [other.pid]}, "different GPUs"),
}


@pytest.mark.parametrize(("driver", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_to_be_a_servers_is_not_its_energy(
    servers: list[Listener], monkeypatch: pytest.MonkeyPatch, driver: Driver, reason: str
) -> None:
    source = source_of(*servers[: 2 if reason == "different GPUs" else 1])
    nvml = ScriptedEnergyNvml(processes=driver(*servers))
    with pytest.raises(MeterUnavailable, match=reason):
        energy_gpus(source, nvml)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    (record,) = (each for each in caveats(source) if each.startswith("energy"))
    assert record.startswith("energy: not measured: ")


def caveats(source: ModelSource) -> list[str]:
    asked = parse_config(["--endpoint", "http://127.0.0.1:1/v1", "--model", "m"]).model
    return [each.sentence for each in unseen_in_server_caveats(source, True, asked)]


def test_a_server_that_is_not_seen_or_a_driver_that_lists_nothing_is_a_reason(servers: list[Listener]) -> None:
    gone = Listener(9, 0, 0)
    with pytest.raises(MeterUnavailable, match="no process that can be seen here listens at the server's port"):
        energy_gpus(source_of(gone), ScriptedEnergyNvml(processes={"GPU-a": [servers[0].pid]}))
    refused = {"nvmlDeviceGetComputeRunningProcesses": pynvml.NVMLError_NoPermission}
    with pytest.raises(MeterUnavailable, match="NVML lists no processes of GPU-a"):
        energy_gpus(source_of(servers[0]), ScriptedEnergyNvml(refused, processes={"GPU-a": []}))


def test_these_gpus_alone_are_metered_and_named(servers: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ScriptedEnergyNvml(
        energy_mj={"GPU-a": 1000, "GPU-b": 1000}, processes={"GPU-a": [], "GPU-b": [servers[0].child]}
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    source = source_of(servers[0])
    assert "energy: of GPU-b, on which the server's processes compute, and no others" in caveats(source)
    found = meters_of("optional", "cpu", 1, 42, None, source=source)
    assert found is not None
    assert [each for each in found.using.devices if each.startswith("GPU")] == ["GPU-b"]


def test_a_server_that_leaves_its_gpu_has_no_meters(servers: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked once, so that what it says next changes nothing; required energy is never left out."""
    nvml = ScriptedEnergyNvml(energy_mj={"GPU-a": 1000}, processes={"GPU-a": [servers[0].child]})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    source = source_of(servers[0])
    listed = nvml.nvmlDeviceGetComputeRunningProcesses

    def listed_once(handle: str) -> list[object]:
        found = listed(handle)
        nvml.processes["GPU-a"] = []
        return found

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", listed_once)
    assert meters_of("optional", "cpu", 1, 42, None, source=source) is not None
    assert meters_of("optional", "cpu", 1, 42, None, source=source) is None
    with pytest.raises(EnergyRefused, match="--energy required: the driver lists no process of the server on a GPU"):
        meters_of("required", "cpu", 1, 42, None, source=source)
