"""What GPU memory holds when most of it is in use: the allocations that are alive at the peak of a recorded block, by owner.

with recorded() as record:
    step()
for name, size in account(record.trace, record.before).items():
    print(f"{size / 2**30:8.2f} GiB  {name}")
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BEFORE = "before the block"
OWN = ("patchgen", "generated_models", "/runtime/", "/kernels/", "transformers")
AGAIN = "recompute_fn"  # of torch's checkpoint: the function that computes a layer again


@dataclass
class Record:
    """Attributes: before: bytes allocated when the block began. trace: torch's events of the block, when it has ended."""

    before: int = 0
    trace: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Records allocations of the current GPU with their Python stacks."""
    record = Record(before=torch.cuda.memory_allocated())
    # Not of what is freed: taking a stack there loses the exception by which a checkpoint ends a recomputation early.
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
    try:
        yield record
        torch.cuda.synchronize()
        snapshot: Any = torch.cuda.memory._snapshot()  # its annotated type lacks keys
        record.trace = snapshot["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def account(trace: Sequence[Mapping[str, Any]], before: int) -> dict[str, int]:
    """Who allocated what is alive at the peak -> bytes, the largest first; `BEFORE`: what was there, as far as it is still."""
    peak = max(range(len(trace) + 1), key=list(_totals(trace, before)).__getitem__)
    alive: dict[int, Mapping[str, Any]] = {}
    for event in trace[:peak]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested" and alive.pop(event["addr"], None) is None:
            before -= event["size"]
    sizes = Counter({BEFORE: before})
    for event in alive.values():
        sizes[_owner(event.get("frames", ()), event["size"])] += event["size"]
    return dict(sizes.most_common())


def _totals(trace: Iterable[Mapping[str, Any]], total: int) -> Iterator[int]:
    """Bytes in use before the first event and after each."""
    yield total
    for event in trace:
        sign = {"alloc": 1, "free_requested": -1}.get(event["action"], 0)
        total += sign * event["size"]
        yield total


def _owner(frames: Iterable[Mapping[str, Any]], size: int) -> str:
    """The innermost function of this repository or of transformers, and whether it runs in a recomputation; else autograd."""
    frames = list(frames)
    again = " (again)" if any(frame["name"] == AGAIN for frame in frames) else ""
    for frame in frames:
        if any(part in frame["filename"] for part in OWN) and "benchmarks" not in frame["filename"]:
            file = frame["filename"].rsplit("/", 1)[-1].removesuffix(".py")
            return f"{file}.{frame['name']}:{frame['line']}{again}"
    return f"autograd, tensors of {size / 2**30:.2f} GiB{again}" if size >= 2**27 else f"small tensors{again}"
