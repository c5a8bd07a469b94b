"""The implementations that ship with the seams of `runtime/ops.py`, one line of registration each.

Imported when the first implementation is asked for. Each function imports its kernel when it is called, so that
selecting `eager` loads nothing, and Triton is loaded by nothing but a Triton kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchgen.runtime import seams

if TYPE_CHECKING:
    from torch import Tensor


def _without_triton() -> str | None:
    from patchgen.kernels.packages import failed_import

    failure = failed_import("triton")
    return f"it needs Triton in a form that can be imported here: {failure}" if failure is not None else None


def _without_sonic() -> str | None:
    from patchgen.kernels.moe.sonic_backend import unavailable

    return unavailable()


def _without_quack() -> str | None:
    from patchgen.kernels.elementwise.norm_quack import unavailable

    return unavailable()


@seams.register("fused_moe", "auto", prefers=("triton",))
def fused_moe_auto(*args, **kwargs) -> Tensor:
    from patchgen.kernels.fused_moe import fused_moe

    return fused_moe(*args, **kwargs, backend="auto")


@seams.register("fused_moe", "torch")
def fused_moe_torch(*args, **kwargs) -> Tensor:
    from patchgen.kernels.fused_moe import fused_moe

    return fused_moe(*args, **kwargs, backend="torch")


@seams.register("fused_moe", "triton", unavailable=_without_triton)
def fused_moe_triton(*args, **kwargs) -> Tensor:
    from patchgen.kernels.fused_moe import fused_moe

    return fused_moe(*args, **kwargs, backend="triton")


@seams.register("fused_moe", "sonic", unavailable=_without_sonic)
def fused_moe_sonic(*args, **kwargs) -> Tensor:
    from patchgen.kernels.fused_moe import fused_moe

    return fused_moe(*args, **kwargs, backend="sonic")


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
