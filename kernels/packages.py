"""Whether a package is usable, tested by importing it: an installed one may have been built for another torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch


@functools.cache
def failed_import(module: str) -> str | None:
    """Why `module` cannot be imported: missing, missing a dependency, or built for another torch; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # packages built for another torch or CUDA raise anything
        return f"{type(error).__name__}: {error}"
    return None


def lacks_package(module: str, package: str) -> str | None:
    """Why a backend that needs a CUDA device and `module` of `package` cannot run here, in one sentence; None if it can."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    failure = failed_import(module)
    if failure is not None:
        return (
            f"it needs the package {package} in a form that can be imported here (`pip install {package}`): {failure}"
        )
    return None


def compiled(function: Callable) -> Callable:
    """`torch.compile(function)`; the function itself on a machine with GPUs but without Triton, which the compiler needs."""
    if torch.cuda.is_available() and failed_import("triton") is not None:
        return function
    return torch.compile(function)
