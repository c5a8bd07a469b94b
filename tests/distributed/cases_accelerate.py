"""What each rank does in the test of accelerate's FSDP2; see test_accelerate.py."""

from __future__ import annotations

import os
from collections import Counter

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from trainer_models import LAYERS, build, counting_seams, rows

STEPS = 3


def train(generated: bool, leaves_out: str = "") -> tuple[list[float], dict[str, torch.Tensor], Counter]:
    """The losses, on rank 0 the trained weights, and the calls of the fused seams.

    Args:
        leaves_out: a module that rank 1 skips.
    """
    # accelerate takes FSDP for devices other than the CPU only; told that this is one, it does what it does there.
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        with counting_seams() as calls:
            return *_train(generated, leaves_out), calls
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def _train(generated: bool, leaves_out: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = build(generated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if leaves_out:
        model.set_reduce_scatter_unused_params(True)
        skipped = model.get_submodule(leaves_out)
        if accelerator.process_index == 1:
            skipped.forward = lambda x: x
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) >= LAYERS + 1
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, accelerator.get_state_dict(model)
