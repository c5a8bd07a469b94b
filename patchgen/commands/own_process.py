"""Calls of a function, each in a process of its own: nothing that one leaves in memory reaches another, nor does a crash.

Processes are forks of one that has imported what they need (a fork server), so that each costs no import of torch.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from patchgen.commands.examination import set_worker_environment

PRELOADED = [
    "torch",
    "transformers.modeling_utils",
    "patchgen.commands.examination",
    "patchgen.runtime.verify.verify_model",
]
DIED = "its process died (out of memory, or a crash in native code)"


class ProcessDied(RuntimeError):
    """A process ended without a result."""


def run_each(
    function: Callable[..., Any], calls: Mapping[str, Mapping[str, Any]], jobs: int
) -> Iterator[tuple[str, Any]]:
    """Calls `function(name, **arguments)` for each name, up to `jobs` at a time; yields each result as it comes.

    One whose process died is called once more when nothing else runs: what another did may have used up the memory. Then its
    result is a `ProcessDied`.

    Raises:
        Exception: what a call raised, or a RuntimeError with its traceback if it cannot be sent; the others are ended.
    """
    alone: list[str] = []
    for name, result in _run(function, calls, jobs):
        if isinstance(result, ProcessDied):
            alone.append(name)
        else:
            yield name, result
    for name in alone:
        yield from _run(function, {name: calls[name]}, 1)


def _run(function: Callable[..., Any], calls: Mapping[str, Mapping[str, Any]], jobs: int) -> Iterator[tuple[str, Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting = list(calls)[::-1]
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                connection, remote = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(remote, function, name, dict(calls[name])), daemon=True)
                process.start()
                remote.close()
                running[connection] = (name, process)
            ready = wait(list(running))
            for connection in [one for one in running if one in ready]:
                name, process = running.pop(connection)
                try:
                    succeeded, result = connection.recv()
                except EOFError:
                    succeeded, result = True, ProcessDied(f"{name}: {DIED}")
                process.join()
                if not succeeded:
                    raise result
                yield name, result
    finally:
        for _, process in running.values():
            process.kill()


def _send(connection: Connection, function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> None:
    set_worker_environment()
    try:
        result = (True, function(name, **arguments))
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        result = (False, error)
    connection.send_bytes(_pickled(name, result))


def _pickled(name: str, result: tuple[bool, Any]) -> memoryview:
    """What a call returned or raised, as `Connection.recv` reads it; an error in its place if it would not."""
    try:
        pickled = ForkingPickler.dumps(result)
        pickle.loads(pickled)  # an exception may be written and not be made again from its `args`
    except Exception as error:
        succeeded, value = result
        what = "returned what cannot be sent" if succeeded else "raised what cannot be sent"
        told = "".join(traceback.format_exception(error)) if succeeded else value.__notes__[-1]
        return ForkingPickler.dumps((False, RuntimeError(f"{name} {what}: {told}")))
    return pickled
