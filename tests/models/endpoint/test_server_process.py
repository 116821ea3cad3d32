"""A server that a run starts: it is waited for, and ended with all its processes, however the run goes on."""

import shlex
import socket
import sys
from pathlib import Path

import psutil
import pytest

from experiment_core_utils.config.served import ServeCommand, ServedModel, serve_commands
from experiment_core_utils.models.endpoint.server_process import answers, running_server
from experiment_core_utils.primitives.errors import ConfigurationError
from tests.processes.openai_server import serving

PROGRAM = (sys.executable, "-m", "tests.processes.openai_program")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def at(port: int) -> ServedModel:
    return ServedModel("s", f"http://127.0.0.1:{port}/v1", "m")


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pids_in(file: Path) -> list[int]:
    return [int(word) for line in file.read_text().splitlines() for word in line.split()[1:]]


@pytest.mark.parametrize("how", [(), ("stubborn",)])
def test_all_processes_of_a_server_are_ended(tmp_path: Path, how: tuple[str, ...]) -> None:
    """Also where the run is interrupted, and where SIGTERM does not end them."""
    port, file, log = free_port(), tmp_path / "pids", tmp_path / "out" / "serve.log"
    command = ServeCommand("q-a", (*PROGRAM, str(port), "a", str(file), *how))

    def interrupted() -> None:
        with running_server(command, at(port), None, log, 60.0, ending_s=0.5 if how else 15.0):
            assert answers(at(port), None)
            assert all(map(is_running, pids_in(file))) and len(pids_in(file)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(map(is_running, pids_in(file))) and not answers(at(port), None)
    assert log.read_text().splitlines() == [f"$ {shlex.join(command.words)}", "answering with a"]


def started(command: ServeCommand, served: ServedModel, log: Path, timeout_s: float = 60.0) -> None:
    with running_server(command, served, None, log, timeout_s):
        pass


def test_a_server_that_ends_or_does_not_answer_is_named_with_its_last_line(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "serve.log"
    script = "import sys; print('reading'); print('no such model'); sys.exit(3)"
    reason = r"the server q-a ended with exit code 3 after .* s, before it answered: no such model; see .*serve.log$"
    with pytest.raises(ConfigurationError, match=reason):
        started(ServeCommand("q-a", (sys.executable, "-c", script)), at(port), log)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"
    reason = f"the server q-b does not answer at 127.0.0.1:{port} within 1 s; see .*, or give --serve_timeout$"
    with pytest.raises(ConfigurationError, match=reason):
        started(ServeCommand("q-b", (sys.executable, "-c", script)), at(port), log, 1.0)
    assert not is_running(int(log.read_text().splitlines()[-1]))


def test_what_cannot_be_started_or_is_there_already_is_refused(tmp_path: Path) -> None:
    log, missing = tmp_path / "serve.log", ServeCommand("q-a", ("no-such-program-here",))
    with pytest.raises(ConfigurationError, match="--serve cannot start no-such-program-here: No such file"):
        started(missing, at(free_port()), log)
    with (
        serving(lists_models=True) as server,
        pytest.raises(ConfigurationError, match="answers at .* already"),
    ):
        started(missing, at(server.port), log)
    elsewhere = ServedModel("s", "http://192.0.2.7:8000/v1", "m")
    with pytest.raises(ConfigurationError, match=r"on this machine, and --endpoint names 192\.0\.2\.7"):
        started(missing, elsewhere, log)


def test_a_command_is_made_for_each_combination_of_values() -> None:
    given = serve_commands("serve 'a b' --x={q} {flags} {other}", ["q=none,fp8", "flags=,--fast --p 2"])
    assert [(each.name, each.words) for each in given] == [
        ("q-none_flags-empty", ("serve", "a b", "--x=none", "{other}")),
        ("q-none_flags-fast-p-2", ("serve", "a b", "--x=none", "--fast", "--p", "2", "{other}")),
        ("q-fp8_flags-empty", ("serve", "a b", "--x=fp8", "{other}")),
        ("q-fp8_flags-fast-p-2", ("serve", "a b", "--x=fp8", "--fast", "--p", "2", "{other}")),
    ]


@pytest.mark.parametrize(
    ("command", "assignments", "reason"),
    [
        ("serve {q}", ["q"], "--set q is not possible; give each NAME=V1,V2 once, and {NAME} in --serve for it"),
        ("serve {q}", ["p=1"], "--set p=1 is not possible"),
        ("serve {q}", ["q=1", "q=2"], "--set q=2 is not possible"),
        ("serve '{q}", ["q=1"], r"cannot be read as a command \(No closing quotation\); correct it"),
        ("serve {q}", ["q=a_b,a-b"], "two servers of --set would be called q-a-b; drop one of the values"),
    ],
)
def test_what_makes_no_commands_is_refused(command: str, assignments: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        serve_commands(command, assignments)
