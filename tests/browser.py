"""Headless Chromium (Debian's package), driven by the Chrome DevTools Protocol over pipes: no driver, no port.

https://chromedevtools.github.io/devtools-protocol/ has the methods and events.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium")
MISSING = "there is no Chromium; apt-get install chromium"
# Chromium starts in a second; a machine that is busy takes its time.
_PATIENCE_S = 120


class Page:
    """A tab of the browser."""

    def __init__(self, browser: "_Browser", session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **arguments: Any) -> Any:
        return self._browser.send(method, arguments, self._session)

    def open(self, path: Path, ready: str) -> None:
        """Opens a file and waits until a JavaScript expression is true."""
        self.send("Page.navigate", url=path.as_uri())
        self.wait(ready)

    def wait(self, ready: str) -> None:
        """Waits until a JavaScript expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.evaluate(ready):
            assert time.monotonic() < deadline, self.problems()
            time.sleep(0.1)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, *places: tuple[float, float]) -> None:
        """Presses at the first place, moves through the others, and lets go at the last."""
        for kind, (x, y) in [
            ("mouseMoved", places[0]),
            ("mousePressed", places[0]),
            *(("mouseMoved", place) for place in places[1:]),
            ("mouseReleased", places[-1]),
        ]:
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def look(self, width: int, *, dark: bool = False, medium: str = "screen") -> None:
        """The width of the screen, what the reader prefers, and where the page is shown."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=medium, features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 640
        )

    def screenshot(self, path: Path) -> None:
        """The whole page, for people."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        events = self._browser.events
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def problems(self) -> list[Any]:
        """Exceptions that nothing caught, what the browser refused, and errors that were logged."""
        told = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [e["params"] for e in self._browser.events if e["method"] in told]


class _Browser:
    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._read = b""
        self._number = 0
        self.events: list[Any] = []

    def send(self, method: str, arguments: dict[str, Any], session: str | None = None) -> Any:
        self._number += 1
        order = {"id": self._number, "method": method, "params": arguments}
        os.write(self._orders, json.dumps(order | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.events.append(message)

    def _receive(self) -> Any:
        while b"\0" not in self._read:
            assert select.select([self._answers], [], [], _PATIENCE_S)[0], "Chromium does not answer"
            new = os.read(self._answers, 1 << 20)
            assert new, "Chromium has ended"
            self._read += new
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


@contextmanager
def open_browser() -> Iterator[Page]:
    """Starts a browser with one empty tab, and ends it."""
    assert CHROMIUM is not None, MISSING
    (orders_in, orders), (answers, answers_out) = os.pipe(), os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile} about:blank"
        # It reads orders from file 3 and answers in file 4.
        command = f'exec "$0" {options} 3<&{orders_in} 4>&{answers_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM],
            pass_fds=(orders_in, answers_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(orders_in)
        os.close(answers_out)
        try:
            browser = _Browser(orders, answers)
            target = browser.send("Target.createTarget", {"url": "about:blank"})["targetId"]
            session = browser.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
            page = Page(browser, session)
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            yield page
            browser.send("Browser.close", {})
            process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()
            os.close(orders)
            os.close(answers)
