"""A headless Chromium over its DevTools pipe, with the standard library alone.

With --remote-debugging-pipe the browser reads JSON messages, each ended by a zero byte, from descriptor 3 and
writes its own to descriptor 4 (https://chromedevtools.github.io/devtools-protocol/).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
_PATIENCE_SECONDS = 120.0


class Browser:
    """One browser with one page; what the page logs and asks for is kept in `console` and `requests`."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.console: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._process = subprocess.Popen(
            # The shell gives the pipes the numbers that the browser expects; `exec` leaves no process between.
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "chromium"]
            + [CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._pending = b""
        self._number = 0
        self._session = ""
        page = next(each for each in self._send("Target.getTargets")["targetInfos"] if each["type"] == "page")[
            "targetId"
        ]
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its script says that it is ready."""
        self.console.clear()
        self.requests.clear()
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._send("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.run("document.documentElement?.dataset.ready === 'true'"):
            assert time.monotonic() < deadline, f"{path} is not ready: {self.console}"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, whole: bool = True) -> bytes:
        """The page as PNG, from top to bottom or as much as fits the window."""
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        """End the browser and remove its folder."""
        try:
            self._session = ""
            self._send("Browser.close")
            self._process.wait(20)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE_SECONDS)
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._pending += data
        text, self._pending = self._pending.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.console.append(json.dumps(parameters["entry"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("warning", "error", "assert"):
            self.console.append(json.dumps(parameters["args"]))
