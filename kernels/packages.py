"""Whether a package can be used here: by importing it, for one that is installed may have been built for another torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch


@functools.cache
def failed_import(module: str) -> str | None:
    """Why `module` cannot be imported: missing, lacking something in turn, or built for another torch; None: it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # built for another torch or CUDA, packages fail in every way
        return f"{type(error).__name__}: {error}"
    return None


def lacks_package(module: str, package: str) -> str | None:
    """Why a backend that needs a CUDA device and `module` of `package` cannot run here, in one sentence; None: it can."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    failure = failed_import(module)
    if failure is not None:
        return (
            f"it needs the package {package} in a form that can be imported here (`pip install {package}`): {failure}"
        )
    return None


def compiled(function: Callable) -> Callable:
    """`torch.compile(function)`; the function itself on a machine with GPUs for which Triton, its compiler, is missing."""
    if torch.cuda.is_available() and failed_import("triton") is not None:
        return function
    return torch.compile(function)
