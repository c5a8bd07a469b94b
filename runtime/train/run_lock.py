"""A lock on the run directory: a second run would train the same steps and remove the first one's files.

It is an operating system lock on `.lock`, released when its process ends in any way, so a killed run blocks nobody.
`running.json` names the process that holds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from patchgen.runtime.parallel.collectives import broadcast_object
from patchgen.runtime.train.recipe import RecipeError

LOCK, OWNER = ".lock", "running.json"
RESTART_SECONDS = 60.0
"""How long restarted ranks wait for the previous ones to exit, which may run on another machine."""


def require_free(directory: Path) -> None:
    """Raises RecipeError if another run uses the directory, or the lock cannot be written to it."""
    if directory.is_dir():
        _acquire(directory, timeout=0).release()


def require_writable(directory: Path) -> None:
    """Raises RecipeError if a run cannot write to the directory; does not create it."""
    if reason := why_not_writable(directory):
        raise not_writable(directory, reason)


def why_not_writable(directory: Path) -> str:
    """Why nothing can be written in a folder that need not exist; "" if it can.

    A file without a name is created where the folder is or would be: permissions alone do not tell, of root least of all.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except PermissionError:
        return f"no permission to write to {existing}"
    except OSError as error:
        return f"nothing can be written to {existing}: {error.strerror or error}"


def not_writable(directory: Path, reason: object) -> RecipeError:
    """The error for a directory in which a run cannot write."""
    return RecipeError(
        f"The directory of the run, {directory}, cannot be written: {reason}. To fix: name another log.directory."
    )


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a run's directory (collective; rank 0 acquires the lock for all).

    Raises:
        RecipeError: on all ranks, if another run uses it, or it cannot be written.
    """
    lock, refusal = None, ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            lock = _acquire(directory, RESTART_SECONDS if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) else 0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            owner = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
            (directory / OWNER).write_text(json.dumps(owner) + "\n", encoding="utf-8")
        except RecipeError as error:
            refusal = str(error)
        except OSError as error:
            refusal = str(not_writable(directory, error))
    if refusal := broadcast_object(refusal):
        raise RecipeError(refusal)
    try:
        yield
    finally:
        if lock is not None:
            (directory / OWNER).unlink(missing_ok=True)
            lock.release()


def _acquire(directory: Path, timeout: float) -> FileLock:
    lock = FileLock(directory / LOCK)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout:
        raise RecipeError(
            f"{directory} is in use: {_owner(directory)} trains there. Wait for it, stop it, or name another "
            f"log.directory. (If no such process exists, the file system has kept the lock: remove {directory / LOCK}.)"
        ) from None
    except OSError as error:
        raise not_writable(directory, error) from error
    return lock


def _owner(directory: Path) -> str:
    try:
        owner = json.loads((directory / OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']}, since {owner['since']},"
    except (OSError, ValueError, KeyError):  # its process holds the lock, but has not written the file yet
        return "another process"
