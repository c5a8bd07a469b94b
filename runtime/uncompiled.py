"""`torch.compiler.disable` that preserves the type of the decorated function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable)


def uncompiled(function: Function) -> Function:
    """The function, excluded from compilation even if compiled code calls it."""
    return cast(Function, torch.compiler.disable(function))
