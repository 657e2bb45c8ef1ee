"""A headless Chromium that opens a page, controlled over its debugging pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60.0
"""How long the browser may take for one answer."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to 4.
START = """
import os, sys
read, write, *command = sys.argv[1:]
os.dup2(int(read), 3)
os.dup2(int(write), 4)
os.execv(command[0], command)
"""


class Browser:
    """One page of a browser.

    Args:
        program: path of Chromium.
        profile: an empty folder.
    """

    def __init__(self, program: str, profile: Path) -> None:
        self.errors: list[str] = []  # messages of the console, exceptions of scripts, blocked content
        self.requests: list[str] = []  # addresses
        self._number = 0
        self._rest = b""
        ends = [*os.pipe(), *os.pipe()]
        # Numbers above 4, so that none of them is overwritten at the start.
        read, self._write, self._read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        command = [sys.executable, "-c", START, str(read), str(write), program, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        for end in (*ends, read, write):
            os.close(end)
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._send(f"{domain}.enable")

    _session: str | None = None

    def open(self, path: Path, *, width: int = 1000, scheme: str = "light", scripts: bool = True) -> None:
        """Open a file on a screen of some width, in light or dark mode, with or without scripts."""
        self.errors.clear()
        self.requests.clear()
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._send("Emulation.setEmulatedMedia", features=features)
        self._send("Emulation.setScriptExecutionDisabled", value=not scripts)
        answer = self._send("Page.navigate", url=path.as_uri())
        assert "errorText" not in answer, answer
        deadline = time.monotonic() + SECONDS
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, f"{path} did not load"

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        """End the browser and its processes."""
        self._session = None
        try:
            self._send("Browser.close")
        finally:
            os.close(self._write)
            os.close(self._read)
            self._process.wait(SECONDS)

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; keep what the page reports meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(parameters))
        elif event == "Page.javascriptDialogOpening":
            self.errors.append("a dialog")


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium not installed: apt-get install --no-install-recommends chromium")
    profile = tmp_path_factory.mktemp("profile")
    opened = Browser(program, profile)
    yield opened
    opened.close()
    shutil.rmtree(profile, ignore_errors=True)
