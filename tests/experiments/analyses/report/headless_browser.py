"""A headless Chromium for tests of pages: it opens a file, runs JavaScript, moves the mouse, and notes what went wrong.

It is spoken to by its DevTools protocol over a websocket, https://chromedevtools.github.io/devtools-protocol/.
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60


def find_browser() -> str | None:
    """The path of a Chromium on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab. `events` holds (method, parameters) of all that the browser reported."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command; raises AssertionError where the browser refuses it."""
        number = next(self._numbers)
        session = {} if self._session is None else {"sessionId": self._session}
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters, **session}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            if "method" in message:
                self.events.append((message["method"], message["params"]))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path: Path, until: str) -> None:
        """Open a file and wait until a JavaScript condition holds."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait(until)

    def wait(self, until: str) -> None:
        """Wait for a JavaScript condition."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"Boolean({until})"):
            assert time.monotonic() < end, (until, self.problems())
            time.sleep(0.05)

    def move_mouse(self, x: float, y: float) -> None:
        """To a place of the window, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """The left button at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        """A key that writes no text but Enter."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def problems(self) -> list[str]:
        """Exceptions, errors and warnings on the console, and what the policy of the page refused."""
        found = []
        for method, what in self.events:
            if (
                method == "Runtime.exceptionThrown"
                or (method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"))
                or (method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"))
            ):
                found.append(json.dumps(what)[:500])
        return found

    def requested(self) -> list[str]:
        """Addresses that were requested, but for those that hold their content."""
        urls = [what["request"]["url"] for method, what in self.events if method == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]


@contextmanager
def open_browser(browser: str, folder: Path, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    """A page in a fresh browser that keeps its files in `folder`; it is closed at the end."""
    command = [browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio",
               "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
               "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}",
               f"--window-size={width},{height}"]  # fmt: skip
    if os.geteuid() == 0:
        # Chromium's sandbox does not work for root.
        command.append("--no-sandbox")
    process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port, path = _address(folder / "DevToolsActivePort", process)
        socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=WAIT_S)
        try:
            yield Page(socket)
        finally:
            socket.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Port and path, which the browser writes once it listens."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        lines = file.read_text().split() if file.exists() else []
        if len(lines) == 2:
            return lines[0], lines[1]
        time.sleep(0.05)
    raise AssertionError("the browser does not listen")
