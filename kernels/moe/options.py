"""The options of one call of the fused experts, and checks of its arguments.

T tokens   H hidden size   E experts   I expert intermediate size   K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from patchgen.kernels.elementwise import activations
from patchgen.kernels.moe.adapters import NO_ADAPTERS, ExpertAdapters


@dataclass(frozen=True)
class MoeOptions:
    """The options of `runtime.ops.fused_moe`, which documents them, `max_rows` and `adapters` of `kernels.fused_moe`."""

    num_experts: int
    activation: Callable[[Tensor], Tensor] | None = None
    apply_gate: Callable[[Tensor], Tensor] | None = None
    is_gated: bool = True
    is_transposed: bool = False
    is_interleaved: bool = False
    post_expert_norm: Callable[[Tensor], Tensor] | None = None
    max_rows: int | None = None
    adapters: ExpertAdapters = NO_ADAPTERS

    def gate(self, gate_up: Tensor) -> Tensor:
        """The model's own gate function: `[R, 2I]` to `[R, I]`."""
        return activations.apply(gate_up, self.activation, self.apply_gate, self.is_gated, self.is_interleaved)

    def recognised(self) -> activations.Activation | None:
        """The gate as a formula that the kernels support; None for any other."""
        return activations.recognise(self.activation, self.apply_gate, self.is_gated, self.is_interleaved)


def check_shapes(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
) -> None:
    """Raises ValueError for inconsistent shapes or dtypes, with what was expected and found."""
    if hidden_states.ndim != 2:
        raise ValueError(f"fused_moe: hidden_states must be [tokens, hidden], found {tuple(hidden_states.shape)}.")
    num_tokens, hidden_size = hidden_states.shape
    if top_k_index.ndim != 2 or top_k_index.shape[0] != num_tokens or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"fused_moe: top_k_index and top_k_weights must both be [{num_tokens}, experts per token], found "
            f"{tuple(top_k_index.shape)} and {tuple(top_k_weights.shape)}."
        )
    if top_k_index.is_floating_point():
        raise ValueError(f"fused_moe: top_k_index must hold integers, found {top_k_index.dtype}.")
    if down_proj.ndim != 3 or gate_up_proj.ndim != 3:
        raise ValueError(
            f"fused_moe: gate_up_proj and down_proj must be stacked over experts (three dimensions), found "
            f"{tuple(gate_up_proj.shape)} and {tuple(down_proj.shape)}."
        )
    intermediate_size = down_proj.shape[1] if options.is_transposed else down_proj.shape[2]
    width = 2 * intermediate_size if options.is_gated else intermediate_size
    num_experts = options.num_experts
    expected = {
        "gate_up_proj": (gate_up_proj, _stacked(num_experts, width, hidden_size, options.is_transposed)),
        "down_proj": (down_proj, _stacked(num_experts, hidden_size, intermediate_size, options.is_transposed)),
        "gate_up_bias": (gate_up_bias, (num_experts, width)),
        "down_bias": (down_bias, (num_experts, hidden_size)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"fused_moe: {name} must be {shape} for num_experts={num_experts}, hidden size {hidden_size}, "
                f"is_gated={options.is_gated}, is_transposed={options.is_transposed}; found {tuple(tensor.shape)}."
            )
    for name, tensor in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj)):
        if tensor.dtype != hidden_states.dtype:
            raise ValueError(
                f"fused_moe: {name} is {tensor.dtype} but hidden_states is {hidden_states.dtype}. To fix: cast one of them; "
                f"under autocast, cast the input of the experts to the dtype of their weights."
            )
    for name, weight, adapter in zip(
        ("gate_up_proj", "down_proj"), (gate_up_proj, down_proj), options.adapters, strict=True
    ):
        if adapter is not None:
            adapter.check(name, weight)


def _stacked(num_experts: int, rows: int, columns: int, is_transposed: bool) -> tuple[int, int, int]:
    return (num_experts, columns, rows) if is_transposed else (num_experts, rows, columns)


def check_index(top_k_index: Tensor, num_experts: int) -> None:
    """Raises ValueError for an index outside `[0, num_experts]`; on the CPU only, to avoid a device sync."""
    if top_k_index.device.type != "cpu" or top_k_index.numel() == 0 or torch.compiler.is_compiling():
        return
    low, high = int(top_k_index.min()), int(top_k_index.max())
    if low < 0 or high > num_experts:
        raise ValueError(
            f"fused_moe: top_k_index must lie in [0, {num_experts}] ({num_experts} marks a slot that is left out), "
            f"found values from {low} to {high}."
        )
