"""A client of servers that send events: plain `http.client`, with a reader of events and bounds for all that comes.

https://html.spec.whatwg.org/multipage/server-sent-events.html says how a stream of events is read.
"""

import base64
import email.utils
import io
import re
import ssl
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import unquote, urlsplit

from experiment_core_utils.primitives.errors import SampleError, SampleTimedOut
from experiment_core_utils.primitives.texts import counted

# Without a limit of its own a request fails where nothing of its answer came for so long,
SILENCE_S = 60.0
# or, however often something came, after this and a second for each token.
_WHOLE_S = 600.0
_CONNECT_S = 15.0
# After the end of an answer, for what it counts.
_CLOSING_S = 5.0
_POLL_S = 0.25
_READ_BYTES = 1 << 16
# Of a line, and of an answer beside its pieces.
_MOST_BYTES = 1 << 20
_BYTES_OF_A_PIECE = 4096
# Of an answer whose server thinks first, or cuts tokens into pieces.
_PIECES_OF_A_TOKEN, _MORE_PIECES = 8, 1024
_LETTERS_OF_A_PIECE = 64


class Bounds:
    """How much of an answer is taken, by the tokens that were asked for.

    Attributes:
        pieces: events, and tokens by the server's count.
        letters: of its text.
        num_bytes: of all that comes.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.pieces = _PIECES_OF_A_TOKEN * tokens + _MORE_PIECES
        self.letters = _LETTERS_OF_A_PIECE * self.pieces
        self.num_bytes = _MOST_BYTES + _BYTES_OF_A_PIECE * self.pieces


def _look_away(waited_s: float, where: str) -> None:
    """Where nobody looks at what waits."""


@dataclass
class Patience:
    """How long requests to a server are waited for, and who looks on."""

    limit_s: float | None = None  #: of the time of a request, and so of a silence; None takes `SILENCE_S` for that
    #: called four times a second while one waits, with the seconds so far and the server; what it raises ends it
    look: Callable[[float, str], None] = _look_away

    def wait(self, seconds: float, where: str) -> None:
        """Do nothing for so long."""
        began_s = time.monotonic()
        while (spent_s := time.monotonic() - began_s) < seconds:
            self.look(spent_s, where)
            time.sleep(min(seconds - spent_s, _POLL_S))


class AnswerIsOver(Exception):
    """Nothing more came behind the end of an answer."""


class Watch:
    """The bounds of one request while it runs."""

    def __init__(self, where: str, patience: Patience, bounds: Bounds) -> None:
        self.where, self.patience, self.bounds = where, patience, bounds
        self.num_bytes = 0
        self.began_s = self.heard_s = time.monotonic()
        self.silence_s = SILENCE_S if patience.limit_s is None else patience.limit_s
        whole_s = _WHOLE_S + bounds.tokens if patience.limit_s is None else patience.limit_s
        self._end_s, self._look_s = self.began_s + whole_s, self.began_s + _POLL_S
        self.is_answered = False

    def hear(self) -> None:
        """An event came; raises SampleTimedOut where the whole time is over."""
        self.heard_s = time.monotonic()
        if self.heard_s > self._end_s:
            self.end_answered()
            raise SampleTimedOut(f"{self.where} has not answered in time ({self.heard_s - self.began_s:.3g} s)")

    def close(self) -> None:
        """The answer has ended; what comes behind it is not waited for as long, however much it is."""
        self.is_answered, self.silence_s = True, min(self.silence_s, _CLOSING_S)
        self._end_s = min(self._end_s, time.monotonic() + _CLOSING_S)

    def end_answered(self) -> None:
        """Raises AnswerIsOver where the answer has ended already, so that nothing behind it is missed."""
        if self.is_answered:
            raise AnswerIsOver

    def look(self) -> None:
        """Nothing came for a moment; raises SampleTimedOut where that is too long."""
        now_s = time.monotonic()
        self._look_s, silent_s = now_s + _POLL_S, now_s - self.heard_s
        if silent_s > self.silence_s or now_s > self._end_s:
            self.end_answered()
            advice = "; give --sample_timeout to wait longer" if self.patience.limit_s is None else ""
            is_silent = silent_s > self.silence_s
            spent = f"{silent_s:.3g} s without a word" if is_silent else f"{now_s - self.began_s:.3g} s"
            raise SampleTimedOut(f"{self.where} has not answered in time ({spent}){advice}")
        self.patience.look(now_s - self.began_s, self.where)

    def count(self, number: int) -> None:
        """So many bytes came, which may be signs of life alone; raises SampleError where that is more than any answer
        of these tokens has, and what `look` raises.
        """
        self.num_bytes += number
        if time.monotonic() > self._look_s:
            self.look()
        if self.num_bytes > self.bounds.num_bytes:
            self.end_answered()
            raise SampleError(
                f"{self.where} sent more than {self.bounds.num_bytes >> 20} MB where at most "
                f"{counted(self.bounds.tokens, 'token')} were asked for"
            )


class _Incoming(io.RawIOBase):
    """What comes from a socket, watched."""

    def __init__(self, connected: Any, watch: Watch) -> None:
        self._socket, self._watch = connected, watch

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._socket.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                number: int = self._socket.recv_into(buffer)
            except TimeoutError:
                self._watch.look()
            else:
                self._watch.count(number)
                return number


class _WatchedSocket:
    """A socket as `http.client` uses it, whose waiting is looked at; Python's file of one cannot be read after that."""

    def __init__(self, connected: Any, watch: Watch) -> None:
        connected.settimeout(_POLL_S)
        self._socket, self._watch, self._is_read = connected, watch, False

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._is_read = True
        return io.BufferedReader(_Incoming(self._socket, self._watch), _READ_BYTES)

    def sendall(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except TimeoutError:
                self._watch.look()

    def close(self) -> None:
        # Else with the file that reads it: the connection of a last response is closed before that is read.
        if not self._is_read:
            self._socket.close()


class Address:
    """Where the requests to a server go, and the headers that they have.

    Args:
        url: base of its paths; user and password in it, or else the key, are the request's credentials.
    """

    def __init__(self, url: str, key: str | None) -> None:
        split = urlsplit(url)
        self.host, self.port, self._is_safe = split.hostname or "", split.port, split.scheme == "https"
        self.path = f"{split.path.rstrip('/')}/chat/completions{f'?{split.query}' if split.query else ''}"
        self.headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "knobprof",
            "Connection": "close",
        }
        if split.username or split.password:
            user = f"{unquote(split.username or '')}:{unquote(split.password or '')}"
            self.headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        elif key:
            self.headers["Authorization"] = f"Bearer {key.strip()}"
        proxy = urllib.request.getproxies().get(split.scheme)
        self._proxy = None if proxy is None or urllib.request.proxy_bypass(self.host) else urlsplit(proxy)
        if self._proxy is not None and not self._is_safe:
            self.path = f"http://{split.netloc.rpartition('@')[2]}{self.path}"
        self._context = ssl.create_default_context() if self._is_safe else None

    def connected(self, watch: Watch) -> HTTPConnection:
        """An open connection; raises OSError where there is none."""
        limit_s = min(watch.silence_s, _CONNECT_S)
        at = (self.host, self.port) if self._proxy is None else (self._proxy.hostname or "", self._proxy.port)
        if self._context is None:
            made = HTTPConnection(*at, timeout=limit_s)
        else:
            made = HTTPSConnection(*at, timeout=limit_s, context=self._context)
            if self._proxy is not None:
                made.set_tunnel(self.host, self.port)
        made.connect()
        made.sock = _WatchedSocket(made.sock, watch)
        return made

    def redirected(self, location: str) -> str | None:
        """The path of the same server that a redirect names; None where it names another one."""
        split = urlsplit(location)
        place = (split.hostname or self.host, split.port or self.port, split.scheme or self.scheme)
        is_own = place == (self.host, self.port, self.scheme) and split.path.startswith("/")
        return f"{split.path}{f'?{split.query}' if split.query else ''}" if is_own else None

    @property
    def scheme(self) -> str:
        """Of its URL."""
        return "https" if self._is_safe else "http"


def body_reader(response: HTTPResponse, watch: Watch) -> Callable[[], bytes]:
    """A call that gives the next bytes of a response, unpacked where they are packed, as soon as there are any; at the
    end none.
    """
    encoding = (response.getheader("Content-Encoding") or "identity").strip().lower()
    if encoding == "identity":
        return lambda: response.read1(_READ_BYTES)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise SampleError(f"{watch.where} packed its answer as {encoding!r}, which was not asked for")
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def read() -> bytes:
        nonlocal unpacking
        while packed := unpacking.unconsumed_tail or unpacking.unused_data or response.read1(_READ_BYTES):
            # A file of gzip is one member or several, one behind the other (RFC 1952).
            if unpacking.eof:
                unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)
            if unpacked := unpacking.decompress(packed, _READ_BYTES):
                watch.count(len(unpacked))
                return unpacked
        return b""

    return read


def events(read: Callable[[], bytes], watch: Watch) -> Iterator[tuple[bytes, bytes]]:
    """Name and data of each event of a stream, as soon as it is whole; the last one also without its empty line.

    Raises:
        SampleError: a line, or the data of an event, is longer than any answer.
    """
    rest, name, data, size = b"", b"", list[bytes](), 0
    is_open = True
    while is_open:
        piece = read()
        is_open = bool(piece)
        lines = (rest + piece).splitlines(keepends=True) if is_open else [rest, b""]
        # A carriage return at the end may be the half of a line's end.
        rest = lines.pop() if is_open and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            line = line.rstrip(b"\r\n")
            if not line:
                if data:
                    watch.hear()
                    yield name, b"\n".join(data)
                name, data, size = b"", [], 0
                continue
            kind, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
            if kind == b"data":
                data.append(value.removeprefix(b" "))
                size += len(value)
            elif kind == b"event":
                name = value.strip()
            elif kind == b"error":  # of older servers of llama.cpp
                name = kind
                data.append(value)
        if max(len(rest), size) > _MOST_BYTES:
            raise SampleError(f"{watch.where} sent a line of more than {_MOST_BYTES >> 20} MB")


def asked_wait_s(response: HTTPResponse) -> float | None:
    """Seconds that a response asks to wait (RFC 9110, Retry-After); None where it does not, or not in its words."""
    asked = (response.getheader("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", asked):
        return float(asked)
    try:
        return max(email.utils.parsedate_to_datetime(asked).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
