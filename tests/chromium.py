"""A headless Chromium that a test drives through its own pipe: the DevTools protocol, without a port or a package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
OPTIONS += ("--remote-debugging-pipe", "--hide-scrollbars", "--disable-extensions", "--disable-background-networking")


def program() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """A page of a browser of its own."""

    def __init__(self, width: int = 1500, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # it may still write there
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        high = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (commands, answers)]

        def take() -> None:  # it reads from its descriptor 3 and writes to 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program(), *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            preexec_fn=take,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (commands, answers, *high):
            os.close(one)
        self._count, self._rest, self._session = 0, b"", None
        self.errors: list[dict] = []  # exceptions and console errors of a page, and what it failed to load
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.size(width, height)

    def close(self) -> None:
        os.close(self._commands)  # it ends when nobody can tell it anything any more
        self._process.wait(timeout=30)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict:
        """What the browser answers to one command."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            if _is_error(answer):
                self.errors.append(answer["params"])
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def open(self, file: Path, anchor: str = "") -> None:
        """Opens a file and waits until it is loaded."""
        self.call("Page.navigate", url=file.resolve().as_uri() + anchor)
        while self.ask("document.readyState") != "complete":
            pass

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> None:
        """A key as a person presses it."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27}.get(key, 0)  # what the browser itself does at a key goes by its number
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)
        self.settle()

    def point(self, x: float, y: float, kind: str = "mouseMoved", *, clicks: int = 0) -> None:
        """The mouse at this place of the window: moved there, or its left button pressed or released (`kind`)."""
        held = {"button": "left", "clickCount": clicks or 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """The left button pressed at `start` and released at `end`."""
        self.point(*start, "mousePressed")
        self.point(*end, "mouseMoved")
        self.point(*end, "mouseReleased")

    def double_click(self, x: float, y: float) -> None:
        for clicks in (1, 2):
            self.point(x, y, "mousePressed", clicks=clicks)
            self.point(x, y, "mouseReleased", clicks=clicks)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as a system prefers it."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _is_error(event: dict) -> bool:
    level = {
        "Runtime.exceptionThrown": lambda params: "error",
        "Runtime.consoleAPICalled": lambda params: params["type"],
        "Log.entryAdded": lambda params: params["entry"]["level"],
    }.get(event.get("method", ""))
    return level is not None and level(event["params"]) == "error"
