"""A server that a run starts, waits for and ends, with all its processes."""

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from experiment_core_utils.config.served import ServeCommand, ServedModel
from experiment_core_utils.models.endpoint.address import is_loopback
from experiment_core_utils.models.endpoint.client import Address
from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.texts import shown

_POLL_S = 0.2
_OF_A_QUESTION_S = 5.0
# That the system has to take away what is killed; what nobody takes away stays listed.
_KILLED_S = 5.0
_OK, _NOT_FOUND = 200, 404


@contextmanager
def running_server(
    command: ServeCommand,
    served: ServedModel,
    key: str | None,
    log: Path,
    timeout_s: float,
    ending_s: float = 15.0,
) -> Iterator[None]:
    """A context in which the server of a command answers at an address of this machine; at its end it is ended.

    Its output is behind what `log` has, after a line with the command. All processes of its group are ended.

    Args:
        key: sent with what asks whether it is ready; None for none.
        timeout_s: that it has until it answers.
        ending_s: that it has to end by SIGTERM; then SIGKILL ends it.

    Raises:
        ConfigurationError: another server answers there already, the address is another machine's, the program cannot
            be started, or it ends or does not answer in time.
    """
    if not is_loopback(served.host):
        raise ConfigurationError(f"--serve starts servers on this machine, and --endpoint names {served.host}")
    where = f"{served.host}:{served.port}"
    if _status(served, "/health", key) is not None:
        raise ConfigurationError(f"a server answers at {where} already; end it, or give another port")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(command.words)}\n")
        output.flush()
        try:
            process = subprocess.Popen(
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C of a terminal is for the run, which ends the server when it is done with it.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigurationError(f"--serve cannot start {shown(command.words[0])}: {error.strerror}") from error
    try:
        _wait_for(process, command, served, key, log, timeout_s)
        yield
    finally:
        _end(process, ending_s)


def _wait_for(
    process: "subprocess.Popen[bytes]",
    command: ServeCommand,
    served: ServedModel,
    key: str | None,
    log: Path,
    timeout_s: float,
) -> None:
    began_s = time.monotonic()
    print(f"starting {command.name} (log: {log}) ...", file=sys.stderr, flush=True)
    while not answers(served, key):
        spent_s = time.monotonic() - began_s
        if process.poll() is not None:
            raise ConfigurationError(
                f"the server {command.name} ended with exit code {process.returncode} after {spent_s:.1f} s, before it "
                f"answered: {_last_line(log)}; see {log}"
            )
        if spent_s > timeout_s:
            raise ConfigurationError(
                f"the server {command.name} does not answer at {served.host}:{served.port} within {timeout_s:g} s; see "
                f"{log}, or give --serve_timeout"
            )
        time.sleep(_POLL_S)
    print(f"starting {command.name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)


def answers(served: ServedModel, key: str | None) -> bool:
    """Whether a server is ready: by its /health, else by the list of its models."""
    health = _status(served, "/health", key)
    return health == _OK or (health == _NOT_FOUND and _status(served, "/models", key) == _OK)


def _status(served: ServedModel, path: str, key: str | None) -> int | None:
    """The status of a GET at the server's root, or of /models beside its other paths; None where nothing answers."""
    base = served.url if path == "/models" else f"http://{served.host}:{served.port}"
    headers = {name: text for name, text in Address(served.url, key).headers.items() if name == "Authorization"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(f"{base}{path}", headers=headers), timeout=_OF_A_QUESTION_S) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):
        return None


def _last_line(log: Path) -> str:
    last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
    return "it said nothing" if last.startswith("$ ") else shown(last.strip())


def _end(process: "subprocess.Popen[bytes]", ending_s: float) -> None:
    """End all processes of the server's group."""
    try:
        _signal(process, signal.SIGTERM)
        _wait_until_gone(process, ending_s)
    finally:
        # Also where the wait is interrupted.
        _signal(process, signal.SIGKILL)
        process.wait()
        _wait_until_gone(process, _KILLED_S)


def _wait_until_gone(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and _is_there(process):
        time.sleep(_POLL_S / 4)


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _is_there(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # else the first process would be there until it is waited for
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
