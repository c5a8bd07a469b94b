"""Gradients travel in the dtype they were computed in, and are summed in fp32 where they arrive.

    reduce-scatter in fp32    every gradient is widened, then travels and is summed on the way    4 bytes per element
    exchange, then sum        every rank sends each other rank its part, as it is                 2 bytes, in bf16

Widening a bf16 gradient adds nothing to it, so both sum the same numbers in the same precision. The order here is that
of the ranks, whatever the library of collectives does. Used by FSDP2 in place of its reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class ExchangeReduce(ReduceScatter):
    """A reduce-scatter over `world` ranks, for one unit of FSDP2; sums only.

    Args:
        world: ranks of the group, at least two: FSDP2 allocates an input, then an output of `1 / world` of its size.
        sent_dtype: what gradients are computed in, and travel in.
    """

    def __init__(self, world: int, sent_dtype: torch.dtype) -> None:
        self.world = world
        self.sent_dtype = sent_dtype
        self.as_computed = True  # False: gradients were accumulated in the dtype of the sum, and travel in it
        self._awaited_output: int | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input in `sent_dtype`, then the output in `dtype`, that of the sum."""
        (numel,) = size
        is_output = self._awaited_output == numel
        self._awaited_output = None if is_output else numel // self.world
        narrow = self.as_computed and not is_output
        return torch.empty(numel, dtype=self.sent_dtype if narrow else dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`output_tensor [N]` becomes the sum over ranks of their `input_tensor [world, N]` at this rank."""
        if op != dist.ReduceOp.SUM or async_op:
            raise NotImplementedError(f"Gradients are summed by an exchange, at once; asked for {op}, {async_op=}.")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(self.world, -1), dim=0, dtype=output_tensor.dtype, out=output_tensor)
