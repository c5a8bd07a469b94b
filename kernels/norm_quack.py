"""RMS norm by the package quack (CuTe), where it is installed; and the choice between it and the compiled formula.

One H200, 2026-11-21, bf16, torch 2.11.0, quack-kernels 0.6.5, liger-kernel 0.8.5. Forward and backward in ms, all in one
process (benchmarks/bench_elementwise.py; every row is in benchmarks/results_elementwise.csv):

    option       [8192, 2048]   [32768, 2048]   heads [8192, 32, 128]   heads [32768, 32, 128]
    eager           0.755          2.721             1.570                   5.694
    compiled        0.223          0.571             0.319                   1.224
    liger           0.300          0.384             0.264                   0.979
    quack           0.208          0.334             0.199                   0.363

quack is first in all four. Liger is second in three of them and first in none, so it is not wired.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor

from patchgen.kernels.elementwise import rms_norm_compiled
from patchgen.kernels.unsupported import UnsupportedOptionError


def is_installed() -> bool:
    """Whether quack can be imported."""
    return importlib.util.find_spec("quack") is not None


def rms_norm_quack(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """`kernels.elementwise.rms_norm` in one kernel, all of it in fp32 until the result is rounded.

    Args:
        in_fp32: taken for granted: the form that rounds before it multiplies by the weight rounds twice.

    Raises:
        UnsupportedOptionError: quack is not installed, or the tensors are not on a GPU.
    """
    del in_fp32
    if not is_installed() or not hidden_states.is_cuda:
        where = (
            "quack is not installed (`pip install quack-kernels`)" if not is_installed() else "it runs on GPUs only"
        )
        raise UnsupportedOptionError(f"rms_norm='quack': {where}. Use rms_norm='compiled' or 'auto'.")
    from quack.rmsnorm import rmsnorm

    return rmsnorm(hidden_states, weight.float() + offset if offset else weight, eps=eps)


def rms_norm_auto(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """By what was measured: quack where it can run, else the compiled formula."""
    norm = rms_norm_quack if hidden_states.is_cuda and is_installed() else rms_norm_compiled
    return norm(hidden_states, weight, eps, offset=offset, in_fp32=in_fp32)
