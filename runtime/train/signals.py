"""Ctrl-C and SIGTERM ask a run to save and exit; a second request makes it exit at once.

The elastic agent also sends SIGTERM when another rank has died. This rank may then be blocked in a device collective, where
Python runs no handler. `reached` still informs the watchdog thread, through the wakeup socket that Python writes signals to.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# A terminal sends Ctrl-C to all processes, and the launcher forwards its own: one request arrives more than once.
SAME_REQUEST_SECONDS = 5.0


Handler = Callable[[int, FrameType | None], Any] | int | None
"""The type that `signal.signal` takes and returns."""


class StopRequest:
    """Records the first SIGINT or SIGTERM within a `with` block; a later one interrupts."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._previous: dict[int, Handler] = {}
        self._reached = False

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._since is not None

    def reached(self) -> bool:
        """Whether a request has arrived, even if the blocked main thread could not record it; callable from any thread."""
        if self._since is None and not self._reached:
            with contextlib.suppress(BlockingIOError):
                arrived = self._arrivals.recv(1024)
                self._reached = bool({signal.SIGINT, signal.SIGTERM} & set(arrived))
        return self._reached or self._since is not None

    def __enter__(self) -> StopRequest:
        self._arrivals, self._written = socket.socketpair()
        for end in (self._arrivals, self._written):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._arrivals.close()
        self._written.close()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt(f"asked to stop a second time ({signal.Signals(number).name})")
