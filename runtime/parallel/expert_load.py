"""How many tokens each expert gets: counted on the device, read on demand.

load = ExpertLoad(model)
...                      # steps
load.read()              # {"model.layers.0.mlp.experts": tensor([1031, 977, ...]), ...}, over all ranks
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime.parallel import checkpointing, sharding
from patchgen.runtime.parallel.collectives import all_reduce


class _Experts(Protocol):
    """The attribute that experts modules of a plan have."""

    num_experts: int


class ExpertLoad:
    """Counts the slots `[T, K]` that the routers of a generated model send to each expert, as integers.

    Args:
        model: its `get_parallel_plan()` names the experts; create the counter before or after `shard_model`.
        modules: paths of the experts modules, for models without a plan.
    """

    def __init__(self, model: nn.Module, modules: list[str] | None = None) -> None:
        paths = modules or sorted({path.rpartition(".")[0] for path in sharding.expert_paths(model)})
        if not paths:
            raise ValueError(f"{type(model).__name__} reports no experts, so there is no load to count.")
        self._counts: dict[str, Tensor] = {}
        self._handles = [
            model.get_submodule(path).register_forward_pre_hook(self._counter(path), with_kwargs=True)
            for path in paths
        ]

    def read(self) -> dict[str, Tensor]:
        """The counts `(E,)` per experts module over all ranks, since the last read. Waits for the device."""
        totals = {}
        for path, counts in self._counts.items():
            total = all_reduce(counts, operation="sum the expert load") if dist.is_initialized() else counts
            totals[path] = total.to("cpu", copy=True)
            counts.zero_()
        return {path: total for path, total in totals.items() if total.any()}

    def close(self) -> None:
        """Stops counting."""
        for handle in self._handles:
            handle.remove()

    def _counter(self, path: str) -> Callable:
        def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
            # Generated experts take (hidden states, indices, weights), in this order.
            index = inspect.signature(module.forward).bind(*args, **kwargs).args[1]
            if torch.is_grad_enabled() and not index.is_meta and not checkpointing.is_replay():
                ones, experts = torch.ones_like(index.reshape(-1)), cast(_Experts, module)
                counts = ones.new_zeros(experts.num_experts + 1).scatter_add_(0, index.reshape(-1), ones)
                if path not in self._counts:  # never replaced: each replay of a captured step adds to it
                    self._counts[path] = counts[:-1].clone()
                else:
                    self._counts[path].add_(counts[:-1])

        return count
