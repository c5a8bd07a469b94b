"""Ends a process when the one that started it ends, in whatever way.

A launcher that is killed (`kill -9`, or by the system when memory is full) cannot end its ranks. They would train on, save, and
hold the GPUs and the lock of the run's folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "PATCHGEN_PARENT_PROCESS"
"""The variable in which a launcher hands its process id to its ranks."""
POLL_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent(parent: int | None = None) -> None:
    """Has this process killed when the one that started it ends, or has ended already.

    On Linux the kernel does it at once, also while this process waits in a collective. A thread looks at the parent's id as well:
    for a parent that ended before this call, and for other systems.

    Args:
        parent: the process that started this one; None: the parent now.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    threading.Thread(target=_watch, args=(parent,), name="parent process", daemon=True).start()


def parent_of_ranks() -> int:
    """The process that started this rank: the launcher that left its id, or the parent now."""
    return int(os.environ.get(PARENT) or os.getppid())


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
