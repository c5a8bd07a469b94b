"""Ctrl-C and SIGTERM ask a run to save and leave; asked again, it leaves at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

# A terminal sends Ctrl-C to all processes, and the launcher hands its own on: one request arrives more than once.
SAME_REQUEST_SECONDS = 5.0


class StopRequest:
    """Notes the first SIGINT or SIGTERM within a `with` block; a later one has its usual effect."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: dict[int, object] = {}

    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._since is not None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt(f"asked to stop a second time ({signal.Signals(number).name})")
