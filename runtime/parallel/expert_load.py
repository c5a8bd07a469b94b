"""How many tokens each expert gets: counted on the device, read on demand.

load = ExpertLoad(model)
...                      # steps
load.read()              # {"model.layers.0.mlp.experts": tensor([1031, 977, ...]), ...}, over all ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime import model_calls
from patchgen.runtime.parallel import checkpointing, sharding
from patchgen.runtime.parallel.collectives import all_reduce
from patchgen.runtime.parallel.experts_calls import num_experts_of, routing_index


class ExpertLoad:
    """Counts the slots `[tokens, experts per token]` that routers of a generated model send to each expert, as integers.

    Only forwards with gradients are counted, not their recomputation by activation checkpointing (ours or transformers'). Tokens
    that `real_tokens` of the model's inputs marks as padding are not counted, so that the numbers are the same in every layout;
    if experts get other rows than the model's, all of them are.

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
        self._real_tokens: Tensor | None = None  # bool, of the last call of the model; None: all are
        self._handles = [
            model.register_forward_pre_hook(self._note_real_tokens, with_kwargs=True),
            *(
                module.register_forward_pre_hook(self._counting_hook(path), with_kwargs=True)
                for path, module in self._experts.items()
            ),
        ]

    def read(self) -> dict[str, Tensor]:
        """The counts `(num_experts,)` per experts module over all ranks since the last read, without modules that have none.

        Every rank must call it. Waits for the device.
        """
        on_host = {path: count.to("cpu", copy=True) for path, count in self.read_on_device().items()}
        return {path: count for path, count in on_host.items() if count.any()}

    def read_on_device(self) -> dict[str, Tensor]:
        """As `read`, of all modules and without waiting: new tensors, int64, where the model computes."""
        local = [self._zero_counts(path) if counts is None else counts for path, counts in self._counts.items()]
        total = torch.cat(local)
        if dist.is_initialized():
            total = all_reduce(total, operation="sum the expert load")
        for counts in self._counts.values():
            if counts is not None:
                counts.zero_()
        return dict(zip(self._counts, total.split([len(counts) for counts in local]), strict=True))

    def _zero_counts(self, path: str) -> Tensor:
        """Zeros on the device where the other ranks computed: parameters may be in host memory."""
        module = self._experts[path]
        parameter = next(module.parameters())
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        return torch.zeros(num_experts_of(module), dtype=torch.long, device=device)

    def close(self) -> None:
        """Stops counting."""
        for handle in self._handles:
            handle.remove()

    def _note_real_tokens(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        # Kept after the call: a layer that is computed again in the backward may be counted only there.
        self._real_tokens = kwargs.get("real_tokens", model_calls.extra_inputs().get("real_tokens"))

    def _counting_hook(self, path: str) -> Callable:
        def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
            index = routing_index(path, (*args, *kwargs.values()))
            if index is None or not torch.is_grad_enabled() or index.is_meta or checkpointing.is_replay():
                return
            slots, real = torch.ones_like(index, dtype=torch.long), self._real_tokens
            if real is not None and index.ndim == 2 and real.numel() == len(index):
                slots = slots * real.reshape(-1, 1)
            counts = slots.new_zeros(num_experts_of(module) + 1)
            counts = counts.scatter_add_(0, index.reshape(-1).long(), slots.reshape(-1))[:-1]
            if (total := self._counts[path]) is None:  # never replaced: each replay of a captured step adds to it
                self._counts[path] = counts.clone()
            else:
                total.add_(counts)

        return count
