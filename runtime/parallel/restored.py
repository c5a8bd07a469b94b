"""A trial of a model that leaves no trace: buffers, plain attributes, gradients and random states are as before it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.runtime import random_state

CONTAINERS = (list, dict, set)
PLAIN = (Tensor, bool, int, float, str, type(None), tuple, *CONTAINERS)
"""Exactly these types: what is kept in others (the states of FSDP, caches) belongs to what they are for."""
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_HOOK_ATTRIBUTES = frozenset(name for name in _MODULE_ATTRIBUTES if "hooks" in name)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores what forwards and backwards in the block change in the model, and torch's, NumPy's and Python's random states.

    A forward may count its calls, keep a value of the first one, or draw random numbers; a backward leaves gradients. In the
    block the parameters have none, so that it adds to none. The values of parameters are not restored, nor containers in others.
    """
    random_states = random_state.capture()
    undo = [step for module in model.modules() for step in _undo_steps(module)]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        random_state.restore(random_states)
        with torch.no_grad():
            for step in undo:
                step()


def _undo_steps(module: nn.Module) -> Iterator[Callable[[], None]]:
    yield from (partial(setattr, parameter, "grad", parameter.grad) for parameter in module.parameters(recurse=False))
    yield partial(_restore, module._buffers, {name: _with_copy(value) for name, value in module._buffers.items()})
    attributes = {name: _with_copy(value) for name, value in vars(module).items() if _is_plain(name, value)}
    yield partial(_restore, vars(module), attributes)
    # Who installs hooks in a first forward keeps a flag that it did: both go.
    for name in vars(module).keys() & _HOOK_ATTRIBUTES:
        hooks = vars(module)[name]
        yield partial(_restore_hooks, hooks, dict(hooks))


def _is_plain(name: str, value: Any) -> bool:
    return type(value) in PLAIN and name not in _MODULE_ATTRIBUTES


def _with_copy(value: Any) -> tuple[Any, Any]:
    """A value and a copy of what may change in it."""
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    return value, value.copy() if type(value) in CONTAINERS else None


def _restore(values: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name, value in values.items() if name not in before and _is_plain(name, value)]:
        del values[name]
    for name, (value, copy) in before.items():
        values[name] = value
        if isinstance(value, Tensor):
            if value.shape != copy.shape:
                value.set_(copy)  # resized in place
            elif not torch.equal(value, copy):
                value.copy_(copy)
        elif isinstance(value, list):
            value[:] = copy
        elif type(value) in CONTAINERS:
            value.clear()
            value.update(copy)


def _restore_hooks(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    if hooks.keys() != before.keys():  # in place: handles refer to the dictionary
        hooks.clear()
        hooks.update(before)
