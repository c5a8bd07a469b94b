"""How many tokens each expert gets: counted on the device, read on demand.

load = ExpertLoad(model)
...                      # steps
load.read()              # {"model.layers.0.mlp.experts": tensor([1031, 977, ...]), ...}, over all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime.parallel import checkpointing, sharding
from patchgen.runtime.parallel.collectives import all_reduce


class _Experts(Protocol):
    """The attribute that every experts module has."""

    num_experts: int


class ExpertLoad:
    """Counts the slots `[tokens, experts per token]` that routers of a generated model send to each expert, as integers.

    Only forwards with gradients are counted, not their recomputation by activation checkpointing (ours or transformers').

    Experts that are called without indices (llama4's: each expert has an equal part of the rows) have no load.

    Args:
        model: its `get_parallel_plan()` names the experts; create the counter before or after `shard_model`.
        modules: paths of the experts modules, for models without a plan.
    """

    def __init__(self, model: nn.Module, modules: list[str] | None = None) -> None:
        paths = modules or sorted({path.rpartition(".")[0] for path in sharding.expert_paths(model)})
        if not paths:
            raise ValueError(f"{type(model).__name__} reports no experts, so there is no load to count.")
        self._experts = {path: model.get_submodule(path) for path in paths}
        # One entry per module, in the same order on every rank, also on a rank that has not run some of them.
        self._counts: dict[str, Tensor | None] = dict.fromkeys(paths)
        self._handles = [
            module.register_forward_pre_hook(self._counting_hook(path), with_kwargs=True)
            for path, module in self._experts.items()
        ]

    def read(self) -> dict[str, Tensor]:
        """The counts `(num_experts,)` per experts module over all ranks since the last read, without modules that have none.

        Every rank must call it. Waits for the device.
        """
        totals = {}
        for path, counts in self._counts.items():
            total = self._zero_counts(path) if counts is None else counts
            if dist.is_initialized():
                total = all_reduce(total, operation="sum the expert load")
            totals[path] = total.to("cpu", copy=True)
            if counts is not None:
                counts.zero_()
        return {path: total for path, total in totals.items() if total.any()}

    def _zero_counts(self, path: str) -> Tensor:
        """Zeros on the device where the other ranks computed: parameters may be in host memory."""
        module = self._experts[path]
        parameter = next(module.parameters())
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        return torch.zeros(cast(_Experts, module).num_experts, dtype=torch.long, device=device)

    def close(self) -> None:
        """Stops counting."""
        for handle in self._handles:
            handle.remove()

    def _counting_hook(self, path: str) -> Callable:
        def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
            index = _routing_index(path, (*args, *kwargs.values()))
            if index is None or not torch.is_grad_enabled() or index.is_meta or checkpointing.is_replay():
                return
            index = index.reshape(-1).long()
            ones, experts = torch.ones_like(index), cast(_Experts, module)
            counts = ones.new_zeros(experts.num_experts + 1).scatter_add_(0, index, ones)[:-1]
            if (total := self._counts[path]) is None:  # never replaced: each replay of a captured step adds to it
                self._counts[path] = counts.clone()
            else:
                total.add_(counts)

        return count


def _routing_index(path: str, values: Iterable[object]) -> Tensor | None:
    """The indices `[tokens, experts per token]` among the arguments of experts, whatever signature a wrapper gives their forward:
    hidden states and weights are floating point. None: there are none.

    Raises:
        ValueError: several arguments are integer tensors.
    """
    integer_tensors = [
        v for v in values if isinstance(v, Tensor) and not (v.is_floating_point() or v.dtype == torch.bool)
    ]
    if len(integer_tensors) > 1:
        raise ValueError(
            f"The experts {path} were called with {len(integer_tensors)} integer tensors, of shapes "
            f"{[tuple(v.shape) for v in integer_tensors]}; "
            "expected one, the experts of each token, to count their load. To fix: do not count it (log.expert_load: false)."
        )
    return integer_tensors[0] if integer_tensors else None
