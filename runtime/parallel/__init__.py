"""Training on many ranks: FSDP2, expert parallelism and Ulysses sequence parallelism, in every combination.

    config.py        the sizes and the rank map            state.py        meshes and groups of this rank
    batch.py         a rank's slice of a batch             sequence.py     the exchanges of sequence parallelism
    media.py         rows of towers, features to tokens    towers.py        towers without input
    mixers.py        convolution and delta rule            experts.py      the token exchange of expert parallelism
    sharding.py      FSDP2 over both meshes                loss.py         means over the global batch
    router_loss.py   the loss of routers                   gradients.py    norm, clipping, non-finite reports
    checkpointing.py activation checkpointing              undivided.py    units that one rank holds alone
    watch.py         collectives that stall                exchange_reduce.py  sums of gradients that travel in bf16
    report.py        what serves what, bytes per rank      gloo_groups.py   gloo's groups, one worker thread each

Generated code reaches the active state through `patchgen.runtime.ops`. This module is light: it imports no torch until
a state is activated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchgen.runtime.parallel.config import ParallelConfig, mesh_text
from patchgen.runtime.parallel.live import Process

if TYPE_CHECKING:
    from patchgen.runtime.parallel.live import Running
    from patchgen.runtime.parallel.state import ParallelState

__all__ = ["ParallelConfig", "activate", "alone", "current", "mesh_text", "running", "slicing", "using"]

_PROCESS = Process()


def current() -> ParallelState | None:
    """The parallel state of this process; None: one process, every parallel meaning is the identity."""
    return _PROCESS.state


def running() -> Running:
    """What goes on under the state of this process, or without one."""
    return _PROCESS.alone if _PROCESS.state is None else _PROCESS.state.running


def alone() -> Running:
    """What goes on without a parallel state, or went on when one became live."""
    return _PROCESS.alone


def slicing() -> ParallelState | None:
    """The parallel state where this process holds a slice of the sequence, else None."""
    state = _PROCESS.state
    return state if state is not None and state.sp > 1 else None


def activate(state: ParallelState | None) -> None:
    """Makes `state` the one that generated code, attention and losses obey from here on."""
    _PROCESS.state = state


@contextlib.contextmanager
def using(state: ParallelState | None) -> Iterator[ParallelState | None]:
    """As `activate`, undone at the end of the block."""
    before = _PROCESS.state
    activate(state)
    try:
        yield state
    finally:
        activate(before)
