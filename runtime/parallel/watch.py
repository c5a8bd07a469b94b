"""Reports collectives that stall and ends the process, instead of waiting half an hour for NCCL's timeout.

    with watch.Watch(model, timeout=300):
        train()

Each of our collectives registers a description (`operation`), and hooks record the running module. A thread checks both:
when an operation has not ended, or no module has been entered, for `timeout` seconds, it prints the rank, the module,
the operation and the Python stacks of all threads, and ends the process, so that the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from patchgen.kernels.bypassed_modules import only_records

EXIT_STATUS = 75
# After a stop request: enough for the rest of a step, unless this run had longer gaps without progress.
STOP_GRACE_SECONDS = 60.0


@dataclass
class _Progress:
    """What this process is doing. Written by the training thread, read by the watching one."""

    module: str = "(no module yet)"
    operations: list[str] = field(default_factory=list)
    last_operation: str = "none"
    paused: bool = False
    changed_at: float = field(default_factory=time.monotonic)


_PROGRESS = _Progress()


@contextlib.contextmanager
def operation(name: str) -> Iterator[None]:
    """Registers a blocking operation while the block runs."""
    _PROGRESS.operations.append(name)
    _PROGRESS.last_operation = name
    _PROGRESS.changed_at = time.monotonic()
    try:
        yield
    finally:
        _PROGRESS.operations.pop()
        _PROGRESS.changed_at = time.monotonic()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Reports no stall while the block runs, e.g. saving or loading, which may take any time."""
    _PROGRESS.paused = True
    try:
        yield
    finally:
        _PROGRESS.paused = False
        _PROGRESS.changed_at = time.monotonic()


def describe() -> str:
    """What this process is doing, in one line: rank, module, operation."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    # On a GPU the host only launches an exchange and blocks later: the last one launched is the best hint.
    computing = f"its forward or backward (last exchange started: {_PROGRESS.last_operation})"
    running = _PROGRESS.operations[-1] if _PROGRESS.operations else computing
    return f"rank {rank}: module {_PROGRESS.module}, operation {running}"


class Watch:
    """Watches the progress of a model until the end of a `with` block.

    Args:
        model: its modules report when they are entered, forward and backward.
        timeout: seconds without progress after which the process ends.
        on_stall: called with the message instead of ending the process.
        stop_requested: whether this process was asked to end, perhaps because another rank died; called in the watching
            thread. Then the timeout is at most three times the longest gap so far, or `STOP_GRACE_SECONDS` if longer.
    """

    def __init__(
        self,
        model: nn.Module,
        timeout: float,
        on_stall: Callable[[str], None] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.stop_requested = stop_requested
        self.timeout = timeout
        self.on_stall = on_stall or _end_process
        self._handles: list = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collective-watch", daemon=True)

    def __enter__(self) -> Watch:
        for path, module in self.model.named_modules():
            label = path or type(self.model).__name__
            self._handles.append(module.register_forward_pre_hook(only_records(_record(label))))
            self._handles.append(module.register_forward_hook(only_records(_record_backward(f"{label} (backward)"))))
        _PROGRESS.changed_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        for handle in self._handles:
            handle.remove()

    def _run(self) -> None:
        longest = 0.0
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            elapsed = time.monotonic() - _PROGRESS.changed_at
            allowed = self.timeout
            if self.stop_requested():
                allowed = min(allowed, max(STOP_GRACE_SECONDS, 3 * longest))
            elif not _PROGRESS.paused:
                longest = max(longest, elapsed)
            if elapsed > allowed and not _PROGRESS.paused:
                stopping = " after this process was asked to end" if allowed < self.timeout else ""
                self.on_stall(
                    f"No progress for {elapsed:.0f} s on {describe()}{stopping}. If it is a collective, some rank has not "
                    "entered it: compare this line on every rank; ranks that differ took another path through the model or "
                    "stopped earlier. If all are the same, this operation itself takes long."
                )
                return


def _record(label: str) -> Callable:
    def hook(*_) -> None:
        _PROGRESS.module = label
        _PROGRESS.changed_at = time.monotonic()

    return hook


def _record_backward(label: str) -> Callable:
    """Records the module when the gradient of its output arrives; unlike module hooks, changes nothing in the graph."""

    def hook(_module: nn.Module, _args: tuple, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(lambda _gradient: _record(label)())

    return hook


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr)
    os._exit(EXIT_STATUS)
