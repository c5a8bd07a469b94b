"""Activation checkpointing: what a layer saves for the backward, and what it recomputes.

    apply(model, "full")        save a layer's input, recompute the layer
    apply(model, "selective")   save matrix products, attention and collectives; recompute the cheap rest
    apply(model, "offload")     recompute nothing, keep activations in host memory until the backward
    apply(model, "none")

Values read by the host in the forward, such as the sizes of an expert exchange, are remembered, so that recomputation
neither waits for the device nor exchanges sizes. So is what routers select (`router_selection.py`), which may not differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
CHECKPOINT_ATTRIBUTE = "_gradient_checkpointing_func"  # of a layer; set by transformers or by `apply`

# The (values, is_replay) stores of the running checkpointed regions, outermost first; values None: nothing is remembered.
_STORES: list[tuple[list | None, bool]] = []
# The same of what routers selected, also in regions that a checkpoint not set by `apply` recomputes.
_SELECTIONS: list[tuple[list | None, bool]] = []


def remember(compute: Callable[[], T]) -> T:
    """`compute()`; while a checkpointed region is recomputed, the value of its first run instead."""
    return _remember(_STORES, compute)


def remember_selection(compute: Callable[[], T]) -> T:
    """As `remember`, for what routers select, also in the regions of `foreign_run`."""
    return _remember(_SELECTIONS, compute)


def keeps_selections() -> bool:
    """Whether a region is running in which `remember_selection` remembers."""
    return bool(_SELECTIONS)


def is_selection_replay() -> bool:
    """Whether `remember_selection` gives what was selected before."""
    return bool(_SELECTIONS) and _SELECTIONS[-1][1]


def _remember(stores: list[tuple[list | None, bool]], compute: Callable[[], T]) -> T:
    values, replay = stores[-1] if stores else (None, False)
    if values is None:
        return compute()
    if replay:
        return values.pop(0)
    # Hidden from selective checkpointing, which counts operations and would miss these in the replay.
    with _disable_current_modes():
        values.append(compute())
    return values[-1]


def is_active() -> bool:
    """Whether a checkpointed region is running, for the first time or in a replay."""
    return bool(_STORES)


def is_replay() -> bool:
    """Whether a checkpointed region is being recomputed: counters must not count it again."""
    return bool(_STORES) and _STORES[-1][1]


@contextlib.contextmanager
def foreign_run(selections: list, *, is_first: bool, is_counted: bool) -> Iterator[None]:
    """Around each run of a region that a checkpoint not set by `apply` recomputes; only what routers select is remembered.

    Args:
        selections: of the first run; empty in it.
        is_counted: False for a replay: counters must not count it again.
    """
    with _store(selections, not is_first, _SELECTIONS), contextlib.nullcontext() if is_counted else _store(None, True):
        yield


@contextlib.contextmanager
def _store(values: list | None, replay: bool, stores: list[tuple[list | None, bool]] = _STORES) -> Iterator[None]:
    # A region may be replayed more than once (a backward with a retained graph): each replay consumes its own copy.
    stores.append((list(values) if replay and values is not None else values, replay))
    try:
        yield
    finally:
        stores.pop()


@contextlib.contextmanager
def _stores(remembered: _Remembered, replay: bool) -> Iterator[None]:
    with _store(remembered.values, replay), _store(remembered.selections, replay, _SELECTIONS):
        yield


@dataclass
class _Remembered:
    """What a region's replay takes from its first run: results of `remember` and of `remember_selection`."""

    values: list = field(default_factory=list)
    selections: list = field(default_factory=list)


def _selective_policy(_context, operation, *_args, **_kwargs) -> torch_checkpoint.CheckpointPolicy:
    is_saved = operation in _SAVED_OPERATIONS or operation.namespace in _SAVED_NAMESPACES
    return (
        torch_checkpoint.CheckpointPolicy.MUST_SAVE if is_saved else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    )


# Collectives, attention kernels, our experts and loss. The policy sees dispatcher ops only: what a torch.autograd.Function
# computes (FlashAttention 4) is recomputed.
_SAVED_NAMESPACES = {"_c10d_functional", "torch_attn", "flash_attn", "flash_attn_3", "patchgen"}
_aten = torch.ops.aten
_SAVED_OPERATIONS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _full_policy(_context, _operation, *_args, **_kwargs) -> torch_checkpoint.CheckpointPolicy:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def contexts(mode: str) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """The contexts of a region's first run and of its replay: the `context_fn` of `torch.utils.checkpoint`.

    A compiled layer is traced once, and its graph determines what is recomputed: torch accepts only its own contexts there.
    No value needs to be remembered, because host reads are not part of a graph.
    """
    if TracingContext.try_get() is not None:
        return torch_checkpoint.create_selective_checkpoint_contexts(
            _full_policy if mode == "full" else _selective_policy
        )
    remembered = _Remembered()
    if mode == "full":
        return _stores(remembered, replay=False), _Replay(remembered)
    forward, recompute = torch_checkpoint.create_selective_checkpoint_contexts(_selective_policy)
    return _Nested(_stores(remembered, replay=False), forward), _Nested(_Replay(remembered), recompute)


class _Replay(contextlib.AbstractContextManager):
    """Provides the values of a region's first run, with its parallel state and kernels.

    The backward may run outside the `with` blocks of the forward. The values are complete only when the replay is entered.
    """

    def __init__(self, remembered: _Remembered) -> None:
        self.remembered, self.state, self.seams = remembered, parallel.current(), seams.selected()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(parallel.using(self.state))
            stack.enter_context(seams.using(**self.seams))
            stack.enter_context(_stores(self.remembered, replay=True))
            self.context = stack.pop_all()

    def __exit__(self, *error) -> None:
        self.context.__exit__(*error)


class _Nested(contextlib.AbstractContextManager):
    def __init__(self, outer, inner) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)


def _offload_activations(run_layer: partial, *args):
    """Runs a layer whose activations are kept in host memory until the backward; parameters stay where FSDP2 keeps them."""
    pinned = torch.cuda.is_available()
    # transformers passes a bound function: `partial(forward, self, ...)`, in older releases `partial(self.__call__)`.
    owners = (getattr(run_layer.func, "__self__", None), *run_layer.args)
    module = next(owner for owner in owners if isinstance(owner, nn.Module))

    def store(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if not tensor.is_cuda or _storage_address(tensor) in {
            _storage_address(parameter) for parameter in module.parameters()
        }:
            return None, tensor
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)  # same strides, which compiled layers expect
        copy.copy_(tensor, non_blocking=True)
        return tensor.device, copy

    def fetch(stored: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = stored
        return tensor if device is None else tensor.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(store, fetch):
        return run_layer(*args)


def _storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage, shared by all views of a gathered parameter and DTensors' local parts."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def is_ours(function: Callable) -> bool:
    """Whether `apply` set this checkpoint function: it remembers the values of its first run, or recomputes nothing."""
    context_fn = function.keywords.get("context_fn") if isinstance(function, partial) else None
    return function is _offload_activations or getattr(context_fn, "func", None) is contexts


def hide_hooks(module: nn.Module) -> None:
    """Hides the hooks of a module inside a layer, such as FSDP2's on experts, from selective checkpointing.

    Whether they gather parameters depends on what was prefetched, so the replay of a layer may run other operations than
    its first run; selective checkpointing, which counts operations, would fail.
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
    """Checkpoints every `GradientCheckpointingLayer` of `model`; call it before `shard_model`.

    Args:
        mode: one of MODES.

    Returns:
        The number of layers.

    Raises:
        ValueError: an unknown mode, or a mode other than "none" for a model without such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if mode not in MODES:
        raise ValueError(f"Activation checkpointing must be one of {', '.join(MODES)}; found '{mode}'.")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if mode != "none" and not layers:
        raise ValueError(
            f"{type(model).__name__} has no GradientCheckpointingLayer, so activation checkpointing '{mode}' would have no "
            "effect. To fix: use 'none'."
        )
    compute: Any = _offload_activations
    if mode != "offload":
        compute = partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=partial(contexts, mode))
    for layer in layers:
        layer.gradient_checkpointing = mode != "none"
        if mode != "none":
            setattr(layer, CHECKPOINT_ATTRIBUTE, compute)
    return len(layers)
