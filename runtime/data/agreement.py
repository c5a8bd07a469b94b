"""Collectives about data: ranks that read streams know neither the lengths nor the bad samples of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from patchgen.runtime.data.problems import Counters, DataError, FailedOnAnotherRank
from patchgen.runtime.parallel.collectives import all_reduce, gather_objects

Result = TypeVar("Result")


# The state of a rank before each batch of data with a limited number of epochs; the maximum over ranks decides.
NO_BATCH, BATCH, FAILURE = 0, 1, 2


def max_over_ranks(local_value: int) -> int:
    """The maximum of a number over all ranks. Collective; the number itself without torch.distributed."""
    if not dist.is_initialized():
        return local_value
    # On the host if the process group supports it, so that nothing waits for a device.
    device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
    value = torch.tensor(local_value, device=device)
    operation = "agree whether any rank has another batch or failed"
    return int(all_reduce(value, operation=operation, op=dist.ReduceOp.MAX).item())


def run_on_all_ranks(work: Callable[[], Result]) -> Result:
    """Runs `work` on every rank. Collective.

    Raises:
        DataError: on all ranks, if it failed on any, with the rank; an error with the same message on all is raised unchanged.
    """
    failure: Exception | None = None
    result: list[Result] = []  # empty only after a failure, which is raised
    try:
        result.append(work())
    except Exception as error:  # of any kind: the other ranks would wait for this one
        failure = error
    raise_on_all_ranks(failure)
    return result[0]


def raise_on_all_ranks(failure: Exception | None) -> None:
    """Raises the failure of any rank on all. Collective. A failure with the same message on all ranks is raised unchanged.

    Raises:
        DataError: with the number and the message of the first rank that failed by itself.
    """
    messages = gather_objects(_message(failure))
    if not any(messages):
        return
    if failure is not None and all(message == messages[0] for message in messages):
        raise failure
    rank = next(rank for rank, message in enumerate(messages) if message and message != FailedOnAnotherRank.MESSAGE)
    raise DataError(f"rank {rank}: {messages[rank]}") from failure


def _message(failure: Exception | None) -> str:
    if failure is None:
        return ""
    if isinstance(failure, DataError) and str(failure):
        return str(failure)
    return " ".join(f"{type(failure).__name__}: {failure}".split())


def counters_of_all_ranks(local_counters: Counters, *, batch_index: int) -> Counters:
    """The sum of the counters of all batch groups, each of which reads a share of the samples. Collective.

    Ranks with the same `batch_index` read the same samples and are counted once.
    """
    total = Counters()
    for _, counters in sorted(dict(gather_objects((batch_index, local_counters.as_dict()))).items()):
        total.merge(Counters.from_dict(counters))
    return total
