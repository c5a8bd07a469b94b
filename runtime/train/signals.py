"""Ctrl-C and SIGTERM ask a run to save and exit; a second request makes it exit at once.

The elastic agent also sends SIGTERM when another rank has died. This rank may then be blocked in a device collective, where
Python runs no handler. `has_arrived` still informs the watchdog thread, through the wakeup socket that Python writes
signals to.
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
    """Records the first SIGINT or SIGTERM within a `with` block; one after `SAME_REQUEST_SECONDS` raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._requested_at: float | None = None
        self._previous: dict[int, Handler] = {}
        self._has_arrived = False

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested_at is not None

    def has_arrived(self) -> bool:
        """Whether a request has arrived, even if the blocked main thread could not record it; callable from any thread."""
        if self._requested_at is None and not self._has_arrived:
            with contextlib.suppress(BlockingIOError):
                arrived = self._read_end.recv(1024)
                self._has_arrived = bool({signal.SIGINT, signal.SIGTERM} & set(arrived))
        return self._has_arrived or self._requested_at is not None

    def __enter__(self) -> StopRequest:
        self._read_end, self._write_end = socket.socketpair()
        for end in (self._read_end, self._write_end):
            end.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._read_end.close()
        self._write_end.close()

    def _record(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is None:
            self._requested_at = now
        elif now - self._requested_at > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt(f"asked to stop a second time ({signal.Signals(number).name})")
