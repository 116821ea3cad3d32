"""A server on loopback that answers each request with the bytes that a script gives: for what no library would send."""

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

#: bytes to send; None waits until the server is given up
Part = bytes | None
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def status(line: str, body: bytes = b"", *headers: str, kind: str = "application/json") -> bytes:
    """A whole response."""
    head = [f"HTTP/1.1 {line}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def event(**chunk: Any) -> bytes:
    """An event with a chunk of these fields."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def piece(content: Any = None, finish: Any = None, **delta: Any) -> bytes:
    """An event with a piece of the first choice."""
    return event(choices=[{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}])


def usage(completion: Any, prompt: Any = 5, **more: Any) -> bytes:
    """An event with counts alone."""
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion, **more})


GOOD = STREAM + piece("two") + piece(None, "stop") + usage(2) + DONE


@dataclass
class ByteServer:
    """The server, while it runs; in `requests` are the bodies of those that came, in `heads` their lines before it."""

    url: str
    requests: list[Any] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


@contextmanager
def serving_bytes(reply: Callable[[Any], Iterable[Part]]) -> Iterator[ByteServer]:
    """A server on a free port, which ends with the context; each connection is one request."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = ByteServer(f"http://127.0.0.1:{port}/v1")

        def answer(connected: socket.socket) -> None:
            with connected, suppress(OSError), connected.makefile("rb") as file:
                head = b"".join(iter(file.readline, b"\r\n")).decode("latin-1")
                length = next((each for each in head.lower().splitlines() if each.startswith("content-length:")), ":0")
                body = json.loads(file.read(int(length.partition(":")[2])) or b"null")
                server.heads.append(head)
                server.requests.append(body)
                for part in reply(body):
                    if part is None:
                        is_over.wait(20)
                    else:
                        connected.sendall(part)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server
        finally:
            is_over.set()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
