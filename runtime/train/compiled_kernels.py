"""What torch.compile needs in a run: a cache that outlasts it, and room for the shapes that a run has."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "TORCHINDUCTOR_CACHE_DIR"
RECOMPILATIONS = 64
"""Of one function, before it runs uncompiled for the rest of the process; torch's 8 are used up by the widths of a model's norms,
with gradients and without, and by a few lengths of rows."""


def keep() -> None:
    """Lets compiled kernels outlast the machine's temporary files, where torch keeps them, unless the user named a place or
    there is no home folder that can be written. For this process and those that it starts."""
    if CACHE in os.environ:
        return
    try:
        folder = Path.home() / ".cache" / "patchgen" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder, or none to write to: torch's own place serves this run
        return
    os.environ[CACHE] = str(folder)


def allow_many_shapes() -> None:
    """Raises the limit of recompilations in this process."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)
