"""One optimizer step of `bench_train.py`: ours, ours replayed as a CUDA graph, and plain transformers with torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from patchgen.runtime import parallel
from patchgen.runtime.parallel import gradients, loss
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train.captured import CapturedStep


def our_step(model: nn.Module, optimizer, inputs: dict, state: ParallelState, items: Tensor) -> tuple[Tensor, Tensor]:
    with parallel.using(state), loss.step(items):
        share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    norm = gradients.clip(model, 1.0, optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share.detach(), norm


def replayed_step(model: nn.Module, device: str, state: ParallelState) -> Callable:
    """`our_step` with its forward and backward as one CUDA graph, as `train.cuda_graph` has it."""

    def compute(inputs: Mapping[str, Any], items: Tensor, tokens: Tensor) -> Tensor:
        with parallel.using(state), loss.step(items, num_tokens=tokens):
            share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
            share.backward()
        return share.detach()

    captured = CapturedStep(model, state, torch.device(device, torch.cuda.current_device()), compute)

    def step(model: nn.Module, optimizer, inputs: dict, state: ParallelState, items: int) -> tuple[Tensor, Tensor]:
        share = captured(inputs, items, inputs["input_ids"].numel() * state.config.num_batches)
        norm = gradients.clip(model, 1.0, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return share, norm

    return step


def their_step(
    model: nn.Module, optimizer, inputs: dict, state: ParallelState, items: Tensor
) -> tuple[Tensor, Tensor]:
    share = model(**inputs, num_items_in_batch=items, use_cache=False).loss
    (share * dist.get_world_size()).backward()  # FSDP2 averages gradients over the ranks
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return share.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm
