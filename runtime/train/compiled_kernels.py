"""What torch.compile needs in a run: a cache that outlasts it, and room for the shapes that a run has."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "TORCHINDUCTOR_CACHE_DIR"
RECOMPILATIONS = 64
"""Of one function, before it runs uncompiled for the rest of the process; torch's 8 are used up by the widths of a model's norms,
with gradients and without, and by a few lengths of rows."""


def keep() -> None:
    """Lets compiled kernels outlast the machine's temporary files, where torch keeps them, unless the user named a place; Triton
    keeps its own in the home folder anyway. For this process and those that it starts."""
    os.environ.setdefault(CACHE, str(Path.home() / ".cache" / "patchgen" / "compiled"))


def allow_many_shapes() -> None:
    """Raises the limit of recompilations in this process."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)
