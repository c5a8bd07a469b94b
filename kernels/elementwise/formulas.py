"""RMS norm, rotary embedding and gated activations: upstream's formulas, and each compiled into one kernel.

On an H200 (benchmarks/results_elementwise.csv, forward and backward) Liger's rotary and SwiGLU are faster than the compiled
formulas at 8,192 tokens and not at 32,768, so there are no hand-written kernels; for norms see `norm_quack`. The eager
functions are bit-identical to upstream's; the tests compare the others with them.

    B batch   S sequence   H hidden size   D head size   N heads   I intermediate size
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from patchgen.kernels import packages
from patchgen.kernels.elementwise import activations


def rms_norm(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension, as upstream computes it.

    Upstream has three forms: LlamaRMSNorm casts back before the weight; GptOssRMSNorm after it (`in_fp32`);
    GemmaRMSNorm after it, with `1 + weight` (`in_fp32`, `offset=1.0`).

    Args:
        hidden_states: `[..., H]`.
        weight: `[H]`.
    """
    dtype = hidden_states.dtype
    wide = hidden_states.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if in_fp32:
        scale = offset + weight.float() if offset else weight
        return (scale * normed).to(dtype)
    return (offset + weight if offset else weight) * normed.to(dtype)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`x * cos + rotate_half(x) * sin` for both, as LlamaAttention's `apply_rotary_pos_emb` computes it.

    Args:
        query, key: `[B, N, S, D]` (`[B, S, N, D]` with `unsqueeze_dim=2`); the numbers of heads may differ.
        cos, sin: `[B, S, D]`.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def gated_activation(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """`activation(gate) * up`; `gate` and `up` are `[..., I]`."""
    return activation(gate) * up


@functools.cache
def _compiled(function: Callable) -> Callable:
    return packages.compiled(function)


@functools.cache
def _compiled_gate(activation: activations.Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """One compiled function per formula, not per activation module: each layer has its own module."""
    return packages.compiled(lambda gate, up: activation.activate(gate) * up)


def rms_norm_compiled(
    hidden_states: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, in_fp32: bool = False
) -> Tensor:
    """`rms_norm` in one kernel; compiled on first use."""
    return _compiled(rms_norm)(hidden_states, weight, eps, offset=offset, in_fp32=in_fp32)


def rotary_compiled(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`rotary` in one kernel; compiled on first use.

    Computed in the memory order of the heads (upstream passes `[B, S, N, D]`, transposed): attention returns gradients in
    that order, and a kernel compiled for another order would copy them before and after it.
    """
    if unsqueeze_dim == 1 and query.stride(1) < query.stride(2):
        transposed = _compiled(rotary)(query.transpose(1, 2), key.transpose(1, 2), cos, sin, 2)
        return transposed[0].transpose(1, 2), transposed[1].transpose(1, 2)
    return _compiled(rotary)(query, key, cos, sin, unsqueeze_dim)


def gated_activation_compiled(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """`gated_activation` in one kernel; compiled on first use.

    Raises:
        ValueError: an activation whose formula `kernels/elementwise/activations.py` does not have.
    """
    recognised = activations.recognise(activation, None, is_gated=False, is_interleaved=False)
    if recognised is None:
        raise ValueError(
            f"swiglu='compiled' supports {', '.join(activations.KINDS)}; the activation {activation!r} computes none of them. "
            "To fix: use swiglu='eager' for this model."
        )
    return _compiled_gate(recognised)(gate, up)
