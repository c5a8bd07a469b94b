"""The built-in implementations of the seams of `runtime/ops.py`, one registration each.

Imported when an implementation is first looked up. Each function imports its kernel when it is called, so `eager` imports
nothing, and only Triton kernels import Triton.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from patchgen.runtime import seams

if TYPE_CHECKING:
    from torch import Tensor


def _without_triton() -> str | None:
    from patchgen.kernels.packages import failed_import

    failure = failed_import("triton")
    return f"it needs Triton, which cannot be imported here: {failure}" if failure is not None else None


def _without_sonic() -> str | None:
    from patchgen.kernels.moe.sonic_backend import unavailable

    return unavailable()


def _without_quack() -> str | None:
    from patchgen.kernels.elementwise.norm_quack import unavailable

    return unavailable()


def _fused_moe(*args, backend: str, **kwargs) -> Tensor:
    from patchgen.kernels.fused_moe import fused_moe

    return fused_moe(*args, **kwargs, backend=backend)


seams.register("fused_moe", "auto", prefers=("triton",))(partial(_fused_moe, backend="auto"))
seams.register("fused_moe", "torch")(partial(_fused_moe, backend="torch"))
seams.register("fused_moe", "triton", unavailable=_without_triton)(partial(_fused_moe, backend="triton"))
for _name in ("fp8", "fp8_wide_gradients"):
    seams.register("fused_moe", _name, unavailable=_without_triton, rounds="triton")(
        partial(_fused_moe, backend=_name)
    )
seams.register("fused_moe", "sonic", unavailable=_without_sonic)(partial(_fused_moe, backend="sonic"))


@seams.register("causal_lm_loss", "auto")
def causal_lm_loss_auto(*args, **kwargs) -> tuple[None, Tensor]:
    from patchgen.kernels.loss.auto import auto_causal_lm_loss

    return auto_causal_lm_loss(*args, **kwargs)


@seams.register("causal_lm_loss", "linear")
def causal_lm_loss_linear(*args, **kwargs) -> tuple[None, Tensor]:
    from patchgen.kernels.loss.linear_cross_entropy import linear_causal_lm_loss

    return linear_causal_lm_loss(*args, **kwargs)


@seams.register("causal_lm_loss", "chunked")
def causal_lm_loss_chunked(*args, **kwargs) -> tuple[None, Tensor]:
    from patchgen.kernels.loss.causal_lm_loss import chunked_causal_lm_loss

    return chunked_causal_lm_loss(*args, **kwargs)


@seams.register("rms_norm", "compiled")
def rms_norm_compiled(*args, **kwargs) -> Tensor:
    from patchgen.kernels.elementwise.formulas import rms_norm_compiled

    return rms_norm_compiled(*args, **kwargs)


@seams.register("rms_norm", "quack", unavailable=_without_quack)
def rms_norm_quack(*args, **kwargs) -> Tensor:
    from patchgen.kernels.elementwise.norm_quack import rms_norm_quack

    return rms_norm_quack(*args, **kwargs)


@seams.register("rms_norm", "auto", prefers=("quack",))
def rms_norm_auto(*args, **kwargs) -> Tensor:
    from patchgen.kernels.elementwise.norm_quack import rms_norm_auto

    return rms_norm_auto(*args, **kwargs)


@seams.register("rotary", "compiled")
def rotary_compiled(*args, **kwargs) -> tuple[Tensor, Tensor]:
    from patchgen.kernels.elementwise.formulas import rotary_compiled

    return rotary_compiled(*args, **kwargs)


@seams.register("swiglu", "compiled")
def gated_activation_compiled(*args, **kwargs) -> Tensor:
    from patchgen.kernels.elementwise.formulas import gated_activation_compiled

    return gated_activation_compiled(*args, **kwargs)
