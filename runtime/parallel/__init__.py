"""Training on many ranks: FSDP2, expert parallelism and Ulysses sequence parallelism, in every combination.

    config.py        the sizes and the rank map            state.py        meshes and groups of this rank
    batch.py         a rank's slice of a batch             sequence.py     the exchanges of sequence parallelism
    media.py         rows of towers, features to tokens    towers.py        towers without input
    mixers.py        convolution and delta rule            experts.py      the token exchange of expert parallelism
    sharding.py      FSDP2 over both meshes                loss.py         means over the global batch
    router_loss.py   the load-balancing loss               gradients.py    norm, clipping, non-finite gradients
    checkpointing.py activation checkpointing              undivided.py    FSDP2 units that one rank owns entirely
    watch.py         collectives that stall                exchange_reduce.py  gradients sent in bf16, summed in fp32
    report.py        implementations and bytes per rank    gloo_groups.py   gloo groups with one worker thread
    offloaded_inputs.py  layers' inputs in host memory     router_selection.py what routers select
    tables.py        embeddings whose rows are sent for

Generated code reaches the active state through `patchgen.runtime.ops`. This module is light: it imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchgen.runtime.parallel.config import ParallelConfig, mesh_text
from patchgen.runtime.parallel.run_context import RunContext

if TYPE_CHECKING:
    from patchgen.runtime.parallel.state import ParallelState

__all__ = [
    "ParallelConfig",
    "activate",
    "context",
    "context_without_state",
    "current",
    "mesh_text",
    "sequence_parallel_state",
    "using",
]


class _Active:
    """The active parallel state of this process, and the context of what runs without one."""

    state: ParallelState | None = None
    context_without_state = RunContext()


def current() -> ParallelState | None:
    """The active parallel state; None: one process, every parallel operation is the identity."""
    return _Active.state


def context() -> RunContext:
    """The context of the active state, or of this process without one."""
    return _Active.context_without_state if _Active.state is None else _Active.state.context


def context_without_state() -> RunContext:
    """The context used while no parallel state is active."""
    return _Active.context_without_state


def sequence_parallel_state() -> ParallelState | None:
    """The active state if it divides the sequence, else None."""
    state = _Active.state
    return state if state is not None and state.sp > 1 else None


def activate(state: ParallelState | None) -> None:
    """Makes `state` the active one, which generated code, attention and losses use."""
    _Active.state = state


@contextlib.contextmanager
def using(state: ParallelState | None) -> Iterator[ParallelState | None]:
    """As `activate`, undone at the end of the block."""
    before = _Active.state
    activate(state)
    try:
        yield state
    finally:
        activate(before)
