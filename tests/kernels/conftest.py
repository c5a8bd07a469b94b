"""Without a GPU the Triton kernels run in Triton's interpreter (`tests/conftest.py` chooses it), mended here."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    _upstream_patch = interpreter._patch_lang_tensor

    def _patch(tensor, scope):
        """Triton 3.6 turns one-element arrays into loop bounds with `int(array)`, which NumPy 2.4 refuses."""
        _upstream_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch
