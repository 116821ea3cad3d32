"""CPU time of the client of `--endpoint` beside a bare `http.client` that reads the same stream, in one process.

    python -m experiments.benchmarks.endpoint_client

Both ask the same server of this process in turns; counted is the CPU time of the asking thread alone, of the whole
request and up to its first piece.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from statistics import median
from urllib.parse import urlsplit

from experiment_core_utils.config.command import run_command
from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.models.endpoint.client import Address
from experiment_core_utils.models.endpoint.floor import null_server
from experiment_core_utils.models.endpoint.model import Connection
from experiment_core_utils.models.endpoint.stream import PieceIds
from experiment_core_utils.primitives.device import HostMarks

NUM_PIECES, NUM_TURNS = (1, 16, 256), 60
_MESSAGES = [{"role": "user", "content": "What is 7 + 7?"}]


def bare(url: str, num_tokens: int) -> None:
    """A request by `http.client`, whose events are read line by line and as JSON."""
    split = urlsplit(url)
    body = {"model": "null", "messages": _MESSAGES, "stream": True, "max_tokens": num_tokens, "temperature": 0}
    connection = HTTPConnection(split.hostname or "", split.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{split.path}/chat/completions", json.dumps(body).encode(), headers)
    with connection.getresponse() as response:
        pieces = []
        for line in response:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content"))
    connection.close()
    assert len(pieces) == num_tokens + 1


def asked(connection: Connection, num_tokens: int) -> None:
    """The same by the client of `--endpoint`."""
    connection.answer(_MESSAGES, num_tokens, {}, HostMarks(), PieceIds())


def cpu_ms(call: Callable[[], object]) -> float:
    """CPU time of this thread in a call, in milliseconds."""
    began_s = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - began_s)


def main() -> None:
    """Print a row for each length of an answer."""
    print("pieces  packets  bare CPU ms  ours CPU ms  ratio")
    for at_once in (True, False):
        for number in NUM_PIECES:
            with null_server(number, at_once=at_once) as url:
                ours = Connection(ServedModel("null", url, "null"), Address(url, None))
                calls = partial(bare, url, number), partial(asked, ours, number)
                pairs = [(cpu_ms(calls[0]), cpu_ms(calls[1])) for _ in range(NUM_TURNS)]
            one, other = (median(each) for each in zip(*pairs[5:], strict=True))
            ratio = median(b / a for a, b in pairs[5:])
            print(f"{number:6}  {'one' if at_once else 'each':>7}  {one:11.3f}  {other:11.3f}  {ratio:5.2f}")


if __name__ == "__main__":
    sys.exit(run_command(main))
