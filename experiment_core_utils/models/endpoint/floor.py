"""The part of a time to the first token that is this client's own: that of a server that answers at once."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median

from experiment_core_utils.config.served import ServedModel
from experiment_core_utils.models.endpoint.client import Address
from experiment_core_utils.models.endpoint.model import Connection
from experiment_core_utils.models.endpoint.stream import PieceIds
from experiment_core_utils.primitives.device import HostMarks

_REQUESTS = 15
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def _event(choices: list[dict[str, object]]) -> bytes:
    made = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "null", "choices": choices}
    data = b"data: " + json.dumps(made).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def null_server(num_pieces: int = 1, *, at_once: bool = True) -> Iterator[str]:
    """Base URL of a server of this process that answers every request with so many pieces as soon as it is there.

    Args:
        at_once: whether they come in one packet; else each in its own.
    """
    deltas = [{"content": f" w{at}"} for at in range(num_pieces)]
    pieces = [_event([{"index": 0, "delta": each, "finish_reason": None}]) for each in deltas]
    end = _event([{"index": 0, "delta": {}, "finish_reason": "stop"}]) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    parts = [_HEAD, *pieces, end]
    sent = [b"".join(parts)] if at_once else parts

    def answer(connected: socket.socket) -> None:
        with connected, suppress(OSError), connected.makefile("rb") as file:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = b"".join(iter(file.readline, b"\r\n")).lower()
            file.read(int(head.partition(b"content-length:")[2].split()[0]))
            for each in sent:
                connected.sendall(each)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    answer(listener.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def client_floor_s() -> float:
    """Median seconds from a request to its first token where nothing computes, the first request left out."""
    found = list[float]()
    with null_server() as url:
        connection = Connection(ServedModel("null", url, "null"), Address(url, None))
        for _ in range(_REQUESTS + 1):
            connection.answer([{"role": "user", "content": "Hi"}], 1, {}, marks := HostMarks(), PieceIds())
            found.append(marks.seconds()[0])
    return median(found[1:])


def floor_line() -> str:
    """What a run says of it at its start."""
    return (
        f"client: {1e3 * client_floor_s():.2f} ms of each time to the first token are its own (median of {_REQUESTS} "
        "requests to a server of this process that answers at once)"
    )
