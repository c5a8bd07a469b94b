"""Activation checkpointing: what a layer keeps for the backward, and what it computes again.

    apply(model, "full")        keep a layer's input, compute the layer again
    apply(model, "selective")   keep matrix products, attention and exchanges; compute the cheap rest again
    apply(model, "offload")     compute nothing again, keep activations in host memory until the backward
    apply(model, "none")

Values that reached the host in the forward, such as the sizes of an expert exchange, are remembered, so that computing
again neither waits for the device nor exchanges sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from patchgen.runtime import parallel, seams

T = TypeVar("T")
MODES = ("full", "selective", "offload", "none")
CHECKPOINT = "_gradient_checkpointing_func"  # of what transformers' activation checkpointing was enabled for

# Outermost first: the value stores of the checkpointed regions that run now; a store under replay hands values out.
_STORES: list[tuple[list, bool]] = []


def remember(compute: Callable[[], T]) -> T:
    """`compute()`; while a checkpointed region runs again, the value of its first run instead."""
    if not _STORES:
        return compute()
    values, replay = _STORES[-1]
    if replay:
        return values.pop(0)
    # Unseen by selective checkpointing, which counts operations and would miss these in the replay.
    with _disable_current_modes():
        values.append(compute())
    return values[-1]


def is_active() -> bool:
    """Whether a checkpointed region runs, for the first time or again."""
    return bool(_STORES)


def is_replay() -> bool:
    """Whether a checkpointed region runs again now: what it counts was counted."""
    return bool(_STORES) and _STORES[-1][1]


@contextlib.contextmanager
def _store(values: list, replay: bool) -> Iterator[None]:
    # A region may run again more than once (a backward with retained graph): each replay takes from its own copy.
    _STORES.append((list(values), True) if replay else (values, False))
    try:
        yield
    finally:
        _STORES.pop()


def _kept(_context, operation, *_args, **_kwargs) -> torch_checkpoint.CheckpointPolicy:
    keep = operation in _KEPT_OPERATIONS or operation.namespace in _KEPT_NAMESPACES
    return torch_checkpoint.CheckpointPolicy.MUST_SAVE if keep else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


# Exchanges, attention kernels, our experts and loss. An autograd function of Python is no operation: what it computes
# (FlashAttention 4) is computed again.
_KEPT_NAMESPACES = {"_c10d_functional", "torch_attn", "flash_attn", "flash_attn_3", "patchgen"}
_aten = torch.ops.aten
_KEPT_OPERATIONS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _recomputed(_context, _operation, *_args, **_kwargs) -> torch_checkpoint.CheckpointPolicy:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def contexts(mode: str) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """The contexts of a region's first run and of its replay: what `torch.utils.checkpoint` calls `context_fn`.

    A compiled layer is traced once, and its graph says what is computed again: torch takes its own contexts alone there.
    Nothing is to be remembered, for what reads the host is not part of a graph.
    """
    if TracingContext.try_get() is not None:
        return torch_checkpoint.create_selective_checkpoint_contexts(_recomputed if mode == "full" else _kept)
    values: list = []
    if mode == "full":
        return _store(values, replay=False), _Replay(values)
    first, again = torch_checkpoint.create_selective_checkpoint_contexts(_kept)
    return _Both(_store(values, replay=False), first), _Both(_Replay(values), again)


class _Replay(contextlib.AbstractContextManager):
    """Opens the store when the region runs again, when its values are there; with the mesh and kernels of its first run.

    The backward may run outside the blocks that the forward ran in.
    """

    def __init__(self, values: list) -> None:
        self.values, self.state, self.seams = values, parallel.current(), seams.selected()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(parallel.using(self.state))
            stack.enter_context(seams.using(**self.seams))
            stack.enter_context(_store(self.values, replay=True))
            self.context = stack.pop_all()

    def __exit__(self, *error) -> None:
        self.context.__exit__(*error)


class _Both(contextlib.AbstractContextManager):
    def __init__(self, outer, inner) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def _in_host_memory(layer: partial, *args):
    """Runs a layer whose activations wait for the backward in host memory; parameters stay where FSDP2 has them."""
    pinned = torch.cuda.is_available()
    # transformers hands over a bound function: `partial(forward, self, ...)`, in older releases `partial(self.__call__)`.
    owners = (getattr(layer.func, "__self__", None), *layer.args)
    module = next(owner for owner in owners if isinstance(owner, nn.Module))

    def store(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if not tensor.is_cuda or _memory(tensor) in {_memory(parameter) for parameter in module.parameters()}:
            return None, tensor
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # in its order, which compiled layers expect
        copy.copy_(tensor, non_blocking=True)
        return tensor.device, copy

    def fetch(stored: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = stored
        return tensor if device is None else tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(store, fetch):
        return layer(*args)


def _memory(tensor: Tensor) -> int:
    """Where a tensor's storage lies: views of a gathered parameter share it, DTensors' local parts included."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def is_own(function: Callable) -> bool:
    """Whether `apply` made it: it remembers what its first run found, or computes nothing again."""
    made = function.keywords.get("context_fn") if isinstance(function, partial) else None
    return function is _in_host_memory or getattr(made, "func", None) is contexts


def recomputes(function: Callable) -> bool:
    """Whether what it checkpoints is computed again."""
    return function is not _in_host_memory


def hide_hooks(module: nn.Module) -> None:
    """Runs the hooks of a module inside a layer, FSDP2's on the experts, unseen by selective checkpointing.

    Whether they gather parameters depends on what was prefetched, so the replay of a layer meets other operations than
    its first run; selective checkpointing, which counts operations, would stop there.
    """

    def hidden(hook: Callable) -> Callable:
        @wraps(hook)
        def run(*args, **kwargs):
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return run

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = hidden(hook)


def apply(model: nn.Module, mode: str) -> int:
    """Checkpoints every layer of `model` that transformers marks as such; before `shard_model`.

    Args:
        mode: one of MODES.

    Returns:
        The number of layers.

    Raises:
        ValueError: an unknown mode, or a model without such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if mode not in MODES:
        raise ValueError(f"Activation checkpointing knows the modes {', '.join(MODES)}, not '{mode}'.")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode != "none" and not layers:
        raise ValueError(
            f"{type(model).__name__} has no GradientCheckpointingLayer, so activation checkpointing '{mode}' would do "
            "nothing. Use 'none'."
        )
    compute: Any = _in_host_memory
    if mode != "offload":
        compute = partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=partial(contexts, mode))
    for layer in layers:
        layer.gradient_checkpointing = mode != "none"
        if mode != "none":
            layer._gradient_checkpointing_func = compute
    return len(layers)
