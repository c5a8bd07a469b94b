"""What was added to the call of a module, which a kernel that reads its weights or knows its type would leave out.

    head.register_forward_hook(...)              a hook, of any of torch's kinds, also of all modules at once
    torch.nn.utils.weight_norm(head)             a hook too
    head.forward = other                         an attribute that hides the class's forward (accelerate's hooks do this)
    torch.nn.utils.parametrizations.orthogonal   another class, which callers see by type(module)

Hooks that only record what runs (`only_records`) are no addition: nothing is lost where they do not run. Reading eight
dictionaries takes about a microsecond, so it is asked at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as of_torch

Hook = TypeVar("Hook", bound=Callable[..., Any])
_ONLY_RECORDS = "_patchgen_only_records"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def addition(module: nn.Module) -> str | None:
    """What was added to a module's call, in a few words; None if a call is its class's forward alone."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            if not hasattr(hook, _ONLY_RECORDS):
                return f"a hook ({_name(hook)}, in {name})"
        for hook in getattr(of_torch, f"_global{name}").values():
            return f"a hook of all modules ({_name(hook)})"
    if "forward" in module.__dict__:
        return f"another forward ({_name(module.__dict__['forward'])})"
    return None


def only_records(hook: Hook) -> Hook:
    """Marks a hook that changes nothing that a module computes."""
    setattr(hook, _ONLY_RECORDS, True)
    return hook


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
