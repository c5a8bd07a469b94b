"""Triton 3.6 turns one-element arrays into loop bounds with `int(array)`, which NumPy 2.4 refuses; loaded before kernels run."""

from triton.runtime import interpreter

_upstream_patch = interpreter._patch_lang_tensor


def _patch(tensor: type, scope: object) -> None:
    _upstream_patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch
