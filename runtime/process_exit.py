"""Ends a process that had process groups of gloo.

A worker thread of gloo lets go of a tensor after it has told those who wait for it, and takes the GIL for that. Where an
interpreter is being finalised it never gets it: its thread is ended in the middle of C++, and the process aborts with "terminate
called without an active exception" and exit status -6, after a training that succeeded. `destroy_process_group` does not help
where anything still refers to a group, as DTensor's caches do. (torch 2.13; pytorch/pytorch#179291)
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Ends this process with an exit status: waits for its threads, runs its exit handlers and writes its output, but does not
    finalise the interpreter. `multiprocessing` ends the processes that it forks in the same way.

    If that fails, the error is printed, and a status of 0 becomes 1.
    """
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for all threads but daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = status or 1
    sys.stderr.flush()
    os._exit(status)
