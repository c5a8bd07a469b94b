"""One run at a time in a directory: a second one would train the same steps and remove the first one's files.

The lock is the system's own, on `.lock`: it ends with the process that holds it, however that ends, so what a killed run
leaves holds up nobody. `running.json` says who has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.train.recipe import RecipeError

LOCK, HOLDER = ".lock", "running.json"
RESTART_SECONDS = 60.0
"""How long ranks that were started again wait for those before them to be gone, on another machine perhaps."""


def require_free(directory: Path) -> None:
    """Refuses a directory that a run is in.

    Raises:
        RecipeError: naming it.
    """
    if directory.is_dir():
        _take(directory, timeout=0).release()


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Holds a run's directory. Every rank calls it; rank 0 has the lock for all.

    Raises:
        RecipeError: on all ranks, another run is in it.
    """
    lock, refusal = None, ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            lock = _take(directory, RESTART_SECONDS if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            about = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
            (directory / HOLDER).write_text(json.dumps(about) + "\n")
        except RecipeError as error:
            refusal = str(error)
    if refusal := broadcast_object(refusal):
        raise RecipeError(refusal)
    try:
        yield
    finally:
        if lock is not None:
            (directory / HOLDER).unlink(missing_ok=True)
            lock.release()


def _take(directory: Path, timeout: float) -> FileLock:
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise RecipeError(
            f"{directory} is in use: {_holder(directory)} trains there. Wait for it, stop it, or name another "
            f"log.directory. (If no such process is there, the disk keeps locks of its own: remove {directory / LOCK}.)"
        ) from None
    return lock


def _holder(directory: Path) -> str:
    try:
        about = json.loads((directory / HOLDER).read_text())
        return f"process {about['process']} on {about['host']}, since {about['since']},"
    except (OSError, ValueError, KeyError):  # it has the lock, and has not said so yet
        return "another process"
