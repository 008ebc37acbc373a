"""A headless Chromium, told what to do over a pipe: https://chromedevtools.github.io/devtools-protocol/.

Its commands and events are JSON with a zero byte behind each, written to its descriptor 3 and read from its 4. A
``Page`` keeps what went wrong in it (``problems``) and what it asked for (``requests``), for a test to look at.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.integration.running import PATIENCE_S

Tree = dict[str, Any]
PROGRAM = "chromium-headless-shell"
# As root, in a container: its own sandbox cannot be made; the pages are ours.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


class Browser:
    """Started when made, with more ``flags`` of Chromium if some are given; ``close`` ends it."""

    def __init__(self, *flags: str) -> None:
        found = shutil.which(PROGRAM)
        assert found is not None, f"got no {PROGRAM}, expected it on the PATH: make tools"
        self._home = tempfile.TemporaryDirectory(prefix="sp-browser-")
        (from_us, self._to), (self._from, to_us) = os.pipe(), os.pipe()
        command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, found, f"--user-data-dir={self._home.name}", *flags, *FLAGS],
            pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        self._number = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def page(self, url: str, width: int = 1440, height: int = 900, *, dark: bool = False, touch: bool = False) -> Page:
        """A new page; a small one of a phone has a second pixel for each."""
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        page.ask("Page.enable")
        page.ask("Runtime.enable")
        page.ask("Log.enable")
        page.ask("Network.enable")
        page.resize(width, height)
        page.prefer("dark" if dark else "light")
        page.go(url)
        return page

    def ask(self, method: str, params: Tree | None = None, session: str | None = None) -> Tree:
        """The answer to a command; what happens meanwhile is told to the pages."""
        self._number += 1
        said = {"id": self._number, "method": method, "params": params or {}}
        os.write(self._to, json.dumps(said | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: Tree = message["result"]
                return result
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None:
                page.hear(message["method"], message["params"])

    def _next(self) -> Tree:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            assert ready, f"got no word of {PROGRAM} in {PATIENCE_S} s"
            some = os.read(self._from, 1 << 20)
            assert some, f"{PROGRAM} has ended"
            self._rest += some
        text, _, self._rest = self._rest.partition(b"\0")
        message: Tree = json.loads(text)
        return message

    def close(self) -> None:
        """End it, and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.problems: list[str] = []
        self.requests: list[str] = []

    def ask(self, method: str, params: Tree | None = None) -> Tree:
        return self._browser.ask(method, params, self._session)

    def hear(self, method: str, params: Tree) -> None:
        """Keep what a test looks at."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def go(self, url: str) -> None:
        """Open ``url``, and wait until its modules have run."""
        self.ask("Page.navigate", {"url": url})
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1 if width > 500 else 2, "mobile": width <= 500}
        self.ask("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as the system would."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", {"features": features})

    def press(self, key: str) -> None:
        """A key that has no character."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})

    def value(self, script: str) -> Any:
        """What an expression is; JSON. A promise is waited for."""
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", params)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for an expression to be true; what it is. The page may load itself again meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self._value_unless_left(script)):
            assert time.monotonic() < deadline, f"never came: {script}\n{self.problems}"
            time.sleep(0.05)
        return found

    def _value_unless_left(self, script: str) -> Any:
        try:
            return self.value(script)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            return None

    def text(self, selector: str) -> str:
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG, of the ``whole`` page or of what is in view."""
        found = self.ask("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", {"targetId": self._target})
