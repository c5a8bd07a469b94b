"""What ranks ask each other: ranks that read streams know neither each other's lengths nor each other's bad samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from patchgen.runtime.data.problems import Counters, DataError, RefusedElsewhere
from patchgen.runtime.parallel.collectives import all_reduce, gather_objects

Result = TypeVar("Result")


# What a rank says before a batch of samples that have an end; the highest of all ranks counts.
NOTHING, BATCH, REFUSAL = 0, 1, 2


def highest(mine: int) -> int:
    """The highest number of any rank; every rank must call it. Without torch.distributed there is one rank."""
    if not dist.is_initialized():
        return mine
    # Over the host where the process group reaches it: then nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    number = torch.tensor(mine, device=device)
    operation = "ask whether any rank has another batch, or refused a sample"
    return int(all_reduce(number, operation=operation, op=dist.ReduceOp.MAX).item())


def together(work: Callable[[], Result]) -> Result:
    """Does this rank's work on its data; every rank must call it.

    Raises:
        DataError: on all ranks, if it failed on any: with the rank, unless all ranks have the same to say.
    """
    failure: Exception | None = None
    result: list[Result] = []  # nothing, only where there is a failure, which is raised
    try:
        result.append(work())
    except Exception as error:  # whatever it is, the other ranks must hear of it: they would wait
        failure = error
    raise_on_all_ranks(failure)
    return result[0]


def raise_on_all_ranks(failure: Exception | None) -> None:
    """Raises what any rank has; every rank must call it. A failure that all ranks share is raised as it is.

    Raises:
        DataError: with the number and the message of the first rank that has one of its own.
    """
    told = gather_objects(_message(failure))
    if not any(told):
        return
    if failure is not None and all(message == told[0] for message in told):
        raise failure
    rank = next(rank for rank, message in enumerate(told) if message and message != RefusedElsewhere.MESSAGE)
    raise DataError(f"rank {rank}: {told[rank]}") from failure


def _message(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return str(failure) if isinstance(failure, DataError) and str(failure) else f"{type(failure).__name__}: {failure}"


def counters_of_all_ranks(mine: Counters, *, batch_index: int) -> Counters:
    """The counters of all batch groups together, where each reads a share of the samples; every rank must call it.

    Ranks with the same `batch_index` read the same samples and count once.
    """
    total = Counters()
    for _, counters in sorted(dict(gather_objects((batch_index, mine.as_dict()))).items()):
        total.merge(Counters.from_dict(counters))
    return total
