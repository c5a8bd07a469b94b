"""Ends a process that had process groups of gloo.

A worker thread of gloo lets go of a tensor after it has told those who wait for it, and takes the GIL for that. Where an
interpreter is being finalised it never gets it: its thread is ended in the middle of C++, and the process aborts with "terminate
called without an active exception" and exit status -6, after a training that succeeded. `destroy_process_group` does not help
where anything still refers to a group, as DTensor's caches do. (torch 2.13; pytorch/pytorch#179291)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Ends this process with an exit status, from its main thread: waits for its other threads, runs its exit handlers and writes
    its output, but does not finalise the interpreter: files that are still open are not flushed. `multiprocessing` ends the
    processes that it forks in the same way.

    An error in one of these steps is printed, and a status of 0 becomes 1; the next steps follow.
    """
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed]
    wait_for_threads = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]  # for all but daemons
    for step in (wait_for_threads, atexit._run_exitfuncs, *(stream.flush for stream in streams)):
        try:
            step()
        except BaseException as error:
            status = status or 1
            with contextlib.suppress(Exception):  # no place is left to print it
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(status)
