"""A step that was launched and whose figures the host has not read: the host goes on, so that the device always has work.

    host      launches step 4 | launches the forward and backward of 5 | reads the figures of 4 | launches the update of 5 | ...
    device    computes 3 ............ | computes 4 ................................ | computes 5 ...

Whether the gradients of a step were finite is known on the device alone when its update is launched: an update of gradients that
were not changes nothing there (`optimizers.take_where`), and the host finds out before it launches the next update. Before a
checkpoint, an evaluation or the end of a run it waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from patchgen.runtime.parallel.gradients import Parts
from patchgen.runtime.train.feed import StepBatches
from patchgen.runtime.train.host_copies import HostCopies
from patchgen.runtime.train.records import StepRecord
from patchgen.runtime.train.router_loads import RouterLoads
from patchgen.runtime.train.sources import SourceLosses

LOSS, NORM, SOURCES = "loss", "norm", "sources"
LOAD = "load of "
"""What the names of figures begin with that are the loads of experts; the rest is the path of their module."""


@dataclass(frozen=True)
class Update:
    """An update that was launched.

    Attributes:
        number: of its step; 1 is the first.
        rate: the learning rate of the first parameter group.
        norm: of all gradients before clipping, a scalar on the device.
        parts: what the norm was computed from, in case it is not finite.
        is_left_to_device: whether the optimizer steps in any case, and the device decides whether that changes anything.
    """

    number: int
    rate: float
    norm: Tensor
    parts: Parts
    is_left_to_device: bool


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose figures are on their way to the host, by the names above."""

    update: Update
    batches: StepBatches
    figures: HostCopies


def record_of(
    launched: LaunchedStep,
    figures: Mapping[str, Tensor],
    seconds: float,
    *,
    peak_tflops: float | None,
    peak_memory: int | None,
    source_losses: SourceLosses | None,
    router_loads: RouterLoads | None,
) -> StepRecord:
    """The record of a step for the listeners.

    Args:
        figures: of `launched`, on the host.
        peak_memory: of this rank's GPU, in bytes.
        source_losses, router_loads: of the run.
    """
    batches, devices = launched.batches, dist.get_world_size()
    tflops, norm = batches.flops / seconds / devices / 1e12, float(figures[NORM])
    loads = {name.removeprefix(LOAD): counts for name, counts in figures.items() if name.startswith(LOAD)}
    experts = router_loads.loads_of(loads) if router_loads else None
    return StepRecord(
        step=launched.update.number,
        loss=float(figures[LOSS]),
        grad_norm=norm,
        lr=launched.update.rate,
        tokens=batches.tokens,
        labels=batches.labels,
        seconds=seconds,
        tokens_per_second_per_device=batches.tokens / seconds / devices,
        tflops=tflops,
        mfu=tflops / peak_tflops if peak_tflops else None,
        peak_memory_gib=peak_memory / 2**30 if peak_memory is not None else None,
        expert_load=experts.busiest if experts else None,
        experts=experts,
        warning=router_loads.warning(experts) if router_loads and experts else None,
        skipped=not math.isfinite(norm),
        sources=source_losses.figures(batches.sources, figures.get(SOURCES)) if source_losses else None,
    )
