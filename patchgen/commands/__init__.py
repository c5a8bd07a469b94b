"""What the commands do. `cli.py` says what there is; each module here is imported only when its command is called."""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """A module of this package, imported when it is first asked for."""
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
