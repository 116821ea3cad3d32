"""A server on loopback that speaks OpenAI's protocol as a script says: for answers and faults that real ones seldom
give.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer; the defaults are those of a server that follows the protocol."""

    pieces: Sequence[str] = ("four", "teen")
    finish_reason: str | None = "stop"
    completion_tokens: int | None = None  #: None: a token a piece, and the end where it came
    prompt_tokens: int = 11
    has_usage: bool = True
    thoughts: Sequence[str] = ()  #: pieces of thinking, in their own field
    status: int = 200
    message: str = "out of order"  #: of another status
    body: Any = None  #: of another status, in place of the protocol's, as JSON or as plain text
    is_cut_off: bool = False  #: whether the connection ends before the answer does
    wait: threading.Event | threading.Barrier | None = None  #: what is waited for before the first piece

    def events(self, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks of the stream."""
        yield _chunk({"role": "assistant"})
        for each in self.thoughts:
            yield _chunk({"reasoning_content": each})
        for each in self.pieces:
            yield _chunk({"content": each})
        if self.is_cut_off:
            return
        yield _chunk({}, self.finish_reason)
        if self.has_usage and include_usage:
            own = len(self.thoughts) + len(self.pieces) + (self.finish_reason == "stop")
            tokens = own if self.completion_tokens is None else self.completion_tokens
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens}
            yield {**_chunk({}), "choices": [], "usage": {**usage, "total_tokens": sum(usage.values())}}


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}


def is_salted(request: dict[str, Any]) -> bool:
    """Whether a request begins with a salt."""
    content = request["messages"][0]["content"]
    text = content if isinstance(content, str) else content[0].get("text", "")
    return re.match(r"\[\d{9}\] ", text) is not None


@dataclass
class OpenAIServer:
    """The server, while it runs.

    Attributes:
        reply: what each request gets.
        requests: bodies of those that came.
        num_others: how many others came, that ask for no answer.
        counts_salted_apart: whether those with a salt, which look for a cache, are answered well and counted alone.
        num_salted: how many of these came.
    """

    reply: Callable[[dict[str, Any]], Reply] = lambda request: Reply()
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_others: int = 0
    counts_salted_apart: bool = True
    num_salted: int = 0
    port: int = 0
    lists_models: bool = False  #: whether it has the list by which a client finds it ready

    @property
    def url(self) -> str:
        """Base of its paths."""
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def serving(
    reply: Callable[[dict[str, Any]], Reply] = lambda request: Reply(), port: int = 0, *, lists_models: bool = False
) -> Iterator[OpenAIServer]:
    """A server on a port of loopback, 0 for a free one, which ends with the context."""
    server = OpenAIServer(reply, lists_models=lists_models)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            server.num_others += 1
            if server.lists_models and self.path.endswith("/models"):
                self._whole(200, {"data": [{"id": "m"}]})
                return
            self._whole(404, {"error": {"message": "nothing there"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if is_salted(body) and server.counts_salted_apart:
                server.num_salted += 1
                found = Reply()
            else:
                server.requests.append(body)
                found = server.reply(body)
            if found.status != 200:
                self._whole(found.status, found.body or {"error": {"message": found.message}})
                return
            if found.wait is not None:
                found.wait.wait(60)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header(*(("Connection", "close") if found.is_cut_off else ("Transfer-Encoding", "chunked")))
            self.end_headers()
            include_usage = body.get("stream_options", {}).get("include_usage", False)
            try:
                for event in found.events(include_usage=include_usage):
                    self._part(f"data: {json.dumps(event)}\n\n", is_chunk=not found.is_cut_off)
                if not found.is_cut_off:
                    self._part("data: [DONE]\n\n")
                    self._part("")
            except OSError:  # the client has given up
                self.close_connection = True

        def _part(self, text: str, *, is_chunk: bool = True) -> None:
            """A part of a stream; an empty chunk ends it."""
            data = text.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunk else data)

        def _whole(self, status: int, content: dict[str, Any] | str) -> None:
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        server.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
