"""The work of the commands that `cli.py` declares. Modules are imported on first use: starting patchgen imports none of them."""

import importlib
from pathlib import Path
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A module of this package, imported on first use."""
    if not (Path(__file__).parent / f"{name}.py").is_file():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
