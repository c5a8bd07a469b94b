"""RMS norm by the package quack (CuTe), where it is installed; and the choice between it and the compiled formula.

One H200, 2026-11-21, bf16, torch 2.11.0, quack-kernels 0.6.5, liger-kernel 0.8.5. Forward and backward in ms, all in one
process (benchmarks/bench_elementwise.py; every row is in benchmarks/results_elementwise.csv):

    option       [8192, 2048]   [32768, 2048]   heads [8192, 32, 128]   heads [32768, 32, 128]
    eager           0.755          2.721             1.570                   5.694
    compiled        0.223          0.571             0.319                   1.224
    liger           0.300          0.384             0.264                   0.979
    quack           0.208          0.334             0.199                   0.363

quack is first in all four. Liger is second in three of them and first in none, so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from patchgen.kernels import choices
from patchgen.kernels.elementwise.formulas import rms_norm_compiled
from patchgen.kernels.packages import lacks_package
from patchgen.kernels.unsupported import UnsupportedOptionError


def unavailable() -> str | None:
    """Why quack cannot run on this machine; None if it can."""
    return lacks_package("quack.rmsnorm", "quack-kernels")


def rms_norm_quack(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """`kernels.elementwise.formulas.rms_norm` in one kernel, all of it in fp32 until the result is rounded.

    Args:
        in_fp32: ignored: always True here, because the other form only rounds once more.

    Raises:
        UnsupportedOptionError: quack cannot be imported, or the tensors are not on a GPU.
    """
    del in_fp32
    reason = unavailable() if hidden_states.is_cuda else "it runs on GPUs only"
    if reason is not None:
        raise UnsupportedOptionError(f"rms_norm='quack': {reason}. To fix: use rms_norm='compiled' or 'auto'.")
    from quack.rmsnorm import rmsnorm  # pyright: ignore[reportMissingImports]

    return rmsnorm(hidden_states, weight.float() + offset if offset else weight, eps=eps)


def rms_norm_auto(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """The fastest measured: quack if it can run here, else the compiled formula."""
    norm = norm_for(hidden_states)
    choices.record("rms_norm", "quack" if norm is rms_norm_quack else "compiled", hidden_states, weight)
    return norm(hidden_states, weight, eps, offset=offset, in_fp32=in_fp32)


def norm_for(hidden_states: Tensor) -> Callable[..., Tensor]:
    """What `rms_norm_auto` computes these hidden states with."""
    return rms_norm_quack if hidden_states.is_cuda and unavailable() is None else rms_norm_compiled
