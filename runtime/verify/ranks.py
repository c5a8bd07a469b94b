"""Real ranks for proofs and tests: gloo processes on this machine that start once and run many cases.

Starting processes and importing torch costs more than most cases, so a `RankPool` keeps its ranks and sends them
functions. A case is a function of an importable module; every rank runs it and returns its result.

    pool = RankPool(world=4)
    pool.run(some_module.some_case, "argument")   # -> [result of rank 0, ..., result of rank 3]
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from patchgen import executed_code

PRELOADED = [
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "patchgen.runtime.verify.media_ranks",
    "patchgen.runtime.verify.two_ranks",
]
"""What the process has imported that ranks are forks of: new ranks for each model cost a tenth of a second."""
COLLECTIVE_TIMEOUT = 90.0
OUT_OF_TIME = "Timed out waiting"  # in the error of a collective of gloo; the others are of ranks whose peer gave up
_FRAME = re.compile(r'  File "(.*)", line (\d+), in ')
_HEADINGS = ("rank ", "ranks ", "Traceback", "During handling of", "The above exception was")
WAITED = (OUT_OF_TIME, "Connection closed by peer", "Connection reset", "Application timeout caused pair closure")


class CaseFailed(AssertionError):
    """A case raised on a rank, or did not end.

    Attributes:
        is_inconclusive: no rank raised an error of the case itself, or crashed: they were killed, did not end, or had a failure
            (`failures.py`).
        has_waited: the ranks that returned no result waited for each other: a collective ran out of time, and nothing else
            failed. Ranks that just did not end may be slow.
        results: of the ranks that returned one.
    """

    def __init__(
        self, message: str, *, is_inconclusive: bool = False, has_waited: bool = False, results: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.is_inconclusive, self.has_waited, self.results = is_inconclusive, has_waited, results

    @property
    def first_error(self) -> str:
        """The first line of the first exception with the line of code below which it was raised, if possible not of a rank that
        only waited for another; or which ranks did not end. At most 200 characters, and the place."""
        found: list[tuple[bool, str]] = []
        place = ""
        for line in str(self).splitlines():
            if frame := _FRAME.match(line):
                is_library = any(folder in line for folder in ("site-packages", "/lib/python"))
                place = place if is_library else f" ({Path(frame[1]).name} line {frame[2]})"
            elif line and not line.startswith((" ", *_HEADINGS)):
                found.append((any(waited in line for waited in WAITED), line[:200] + place))
                place = ""
        return min(found, key=lambda one: one[0])[1] if found else str(self).strip()[:200]


class RankPool:
    """`world` gloo ranks on this machine; a failed case ends them, and the next case starts new ones.

    Args:
        collective_timeout: seconds that a collective waits for other ranks.
    """

    def __init__(self, world: int, *, collective_timeout: float = COLLECTIVE_TIMEOUT) -> None:
        self.world, self.collective_timeout = world, collective_timeout
        self._processes: list = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None
        self._has_lost = False

    def run(self, case: Callable, *args, timeout: float = 240.0, **kwargs) -> list:
        """The results of `case(*args, **kwargs)` on every rank.

        Args:
            timeout: seconds within which every rank must return.

        Raises:
            CaseFailed: with the tracebacks of the ranks that raised, and the ranks that did not end in time.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # of a rank that died: reading its answer tells
                connection.send((case, args, kwargs))
        results: dict[int, object] = {}
        errors: dict[int, tuple[str, bool]] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(errors) < self.world and time.monotonic() < deadline:
            pending = {
                connection: rank
                for rank, connection in enumerate(self._connections)
                if rank not in results and rank not in errors
            }
            ready = wait(list(pending), timeout=1.0)
            for connection, rank in pending.items():
                if connection not in ready:
                    continue
                try:
                    succeeded, value = connection.recv()
                except (EOFError, ConnectionError):
                    succeeded, value = False, self._exit_cause(rank)
                (results if succeeded else errors)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + 5.0)  # the others may wait for this one forever
        if len(results) == self.world:
            return [results[rank] for rank in range(self.world)]
        silent = [rank for rank in range(self.world) if rank not in results and rank not in errors]
        self.lose()
        parts = [f"rank {rank}:\n{text}" for rank, (text, _) in sorted(errors.items())]
        if silent:
            parts.append(f"ranks {silent} did not end")
        is_inconclusive = all(is_inconclusive for _, is_inconclusive in errors.values())
        texts = [text for text, _ in errors.values()]
        has_waited = all(any(told in text for told in WAITED) for text in texts)
        has_waited &= any(OUT_OF_TIME in text for text in texts)
        raise CaseFailed(
            "\n".join(parts), is_inconclusive=is_inconclusive, has_waited=has_waited, results=list(results.values())
        )

    def functions(self) -> frozenset[str]:
        """What the ranks have called since they started; everything, if a failed case ended ranks of which nobody knows."""
        if self._has_lost:
            return executed_code.everything()
        return frozenset[str]().union(*self.run(executed_code.functions)) if self._processes else frozenset()

    def lose(self) -> None:
        """Ends ranks that cannot go on; what they have called is not known then."""
        self.close()
        self._has_lost = True

    def close(self) -> None:
        """Ends the ranks; others start with the next case."""
        self._has_lost = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _exit_cause(self, rank: int) -> tuple[str, bool]:
        """What ended a process, and whether that says nothing of the case: the system kills one when memory is full."""
        self._processes[rank].join(timeout=5.0)
        code = self._processes[rank].exitcode
        return f"the process ended (exit code {code})\n", code == -signal.SIGKILL

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="patchgen-ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world):
            connection, remote = context.Pipe()
            arguments = (rank, self.world, str(store), self.collective_timeout, remote)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _main_left_alone():
                process.start()
            remote.close()
            self._processes.append(process)
            self._connections.append(connection)


@contextlib.contextmanager
def _main_left_alone() -> Iterator[None]:
    """Within the block a new process does not import the main module, which may be a script that starts a training run."""
    main = vars(sys.modules["__main__"])
    before = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    main.pop("__file__", None)
    try:
        yield
    finally:
        main |= before


def _serve(rank: int, world: int, store: str, collective_timeout: float, connection: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    import torch
    import torch.distributed as dist

    from patchgen.runtime import seams
    from patchgen.runtime.failures import is_machine_failure
    from patchgen.runtime.parallel import gloo_groups

    torch.set_num_threads(1)
    gloo_groups.use_one_worker()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),  # pyright: ignore[reportPrivateImportUsage]  # documented there
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=collective_timeout),
    )
    while True:
        try:
            case, args, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            with seams.using(**seams.selected()):  # restores seams that a case configures
                result = (True, case(*args, **kwargs))
        except BaseException as error:
            is_inconclusive = not isinstance(error, Exception) or is_machine_failure(error)
            result = (False, (traceback.format_exc(), is_inconclusive))
        with contextlib.suppress(BrokenPipeError):
            connection.send(result)
