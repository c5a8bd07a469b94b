"""The fused experts of one MoE layer: one function, several backends.

backend      what it is                                              where it runs
reference    expert by expert, the reference of the tests            everywhere
torch        sort, torch's grouped product, compiled elementwise     everywhere
triton       our kernels (`moe/triton_backend.py`)                   compute capability 9.0 or newer
fp8          our kernels with every product in FP8                   compute capability 9.0 or newer
             (`moe/fp8_backend.py`); chosen by name alone
fp8_wide_gradients   the same, but both weight gradients         compute capability 9.0 or newer
             in the dtype of the layer
sonic        the package sonic-moe                                   wherever that package runs
auto         triton where it was measured to be faster (compute      everywhere
             capability 9.0), else torch (`moe/auto.py`)

from patchgen.kernels.fused_moe import fused_moe
out = fused_moe(x, index, weights, gate_up_proj, down_proj, num_experts=128, activation=act, backend="torch")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from patchgen.kernels import choices
from patchgen.kernels.moe.adapters import NO_ADAPTERS, ExpertAdapters
from patchgen.kernels.moe.auto import choose_backend
from patchgen.kernels.moe.options import MoeOptions, check_index, check_shapes
from patchgen.kernels.moe.reference import reference
from patchgen.kernels.moe.sonic_backend import fused_moe_sonic
from patchgen.kernels.moe.torch_backend import fused_moe_torch
from patchgen.kernels.unsupported import UnsupportedOptionError


def _triton(*arguments) -> Tensor:
    from patchgen.kernels.moe.triton_backend import fused_moe_triton  # loads Triton

    return fused_moe_triton(*arguments)


def _fp8(*arguments, wide_gradients: bool = False) -> Tensor:
    from patchgen.kernels.moe.fp8_backend import fused_moe_fp8  # loads Triton

    return fused_moe_fp8(*arguments, wide_gradients)  # pyright: ignore[reportCallIssue]  # arguments are the first eight


def _auto(
    hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, options
) -> Tensor:
    backend = choose_backend(hidden_states, gate_up_proj, down_proj, options, (gate_up_bias, down_bias))
    choices.record("fused_moe", backend, hidden_states, gate_up_proj)
    return BACKENDS[backend](
        hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, options
    )


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "auto": _auto,
    "reference": reference,
    "torch": fused_moe_torch,
    "triton": _triton,
    "fp8": _fp8,
    "fp8_wide_gradients": partial(_fp8, wide_gradients=True),
    "sonic": fused_moe_sonic,
}

WITHOUT_ADAPTERS = frozenset({"sonic", "fp8", "fp8_wide_gradients"})
"""Backends without low-rank adapters."""


def fused_moe(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    num_experts: int,
    activation: Callable[[Tensor], Tensor] | None = None,
    apply_gate: Callable[[Tensor], Tensor] | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    is_gated: bool = True,
    is_transposed: bool = False,
    is_interleaved: bool = False,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
    max_rows: int | None = None,
    adapters: ExpertAdapters | None = None,
    backend: str = "auto",
) -> Tensor:
    """The experts of one MoE layer; arguments and result as in `runtime.ops.fused_moe`, but `top_k_index` and `top_k_weights`
    may not be None.

    Args:
        max_rows: an upper bound on the number of (token, expert) slots in use (index < num_experts), if the caller knows one.
            It only bounds memory, and backends may ignore it. With more slots in use the result is undefined.
        adapters: low-rank adapters of the weights (`moe/adapters.py`); None: no adapters.
        backend: a name of `BACKENDS`.

    Raises:
        ValueError: inconsistent shapes or dtypes, or an option that the backend does not support; the message names it.
    """
    options = MoeOptions(
        num_experts=num_experts,
        activation=activation,
        apply_gate=apply_gate,
        is_gated=is_gated,
        is_transposed=is_transposed,
        is_interleaved=is_interleaved,
        post_expert_norm=post_expert_norm,
        max_rows=max_rows,
        adapters=NO_ADAPTERS if adapters is None else adapters,
    )
    if backend not in BACKENDS:
        raise ValueError(f"fused_moe has no backend '{backend}'. Available: {', '.join(BACKENDS)}.")
    if options.adapters.tensors and backend in WITHOUT_ADAPTERS:
        raise UnsupportedOptionError(f"fused_moe, backend '{backend}': adapters of experts are not supported.")
    arguments = (hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, options)
    check_shapes(*arguments)
    check_index(top_k_index, num_experts)
    if top_k_index.numel() == 0:
        # No slots: every input stays in the graph, with a zero gradient.
        inputs = (top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias, *options.adapters.tensors)
        zeros = hidden_states * 0
        if post_expert_norm is not None:
            zeros = zeros + post_expert_norm(zeros) * 0
        return zeros + sum(tensor.sum() * 0 for tensor in inputs if tensor is not None)
    return BACKENDS[backend](*arguments)
