"""`torch.compiler.disable` with the types of what it decorates, which torch's own loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable)


def uncompiled(function: Function) -> Function:
    """The function as it is called by code that is compiled: by itself, uncompiled."""
    return cast(Function, torch.compiler.disable(function))
