"""The experts of one MoE layer by the package sonic-moe (CuTe), where it is installed: the `sonic` backend.

T tokens   H hidden size   E experts   I expert intermediate size   K experts per token
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from patchgen.kernels.moe.options import MoeOptions
from patchgen.kernels.packages import lacks_package
from patchgen.kernels.unsupported import UnsupportedOptionError

_NAMES = {"silu": "SWIGLU", "gelu": "GEGLU", "relu": "REGLU"}


def unavailable() -> str | None:
    """Why sonic-moe cannot run on this machine; None if it can."""
    return lacks_package("sonicmoe", "sonic-moe")


def fused_moe_sonic(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    options: MoeOptions,
) -> Tensor:
    """Shapes as in `runtime.ops.fused_moe`.

    Raises:
        ValueError: an option that sonic-moe does not have, or no sonic-moe.
    """
    reason = unsupported(hidden_states, gate_up_bias, down_bias, options)
    if reason is not None:
        raise UnsupportedOptionError(
            f"fused_moe, backend 'sonic': {reason} Use fused_moe='torch' or 'eager' for this model."
        )
    from sonicmoe import moe_general_routing_inputs  # pyright: ignore[reportMissingImports]
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]

    num_tokens, top_k = top_k_index.shape
    token = torch.arange(num_tokens, device=top_k_index.device, dtype=torch.int32)
    order = (2, 1, 0) if options.is_transposed else (1, 2, 0)
    out, _ = moe_general_routing_inputs(
        hidden_states,
        top_k_weights.reshape(-1),
        token.repeat_interleave(top_k),
        top_k_index.reshape(-1).int(),
        gate_up_proj.permute(*order),
        gate_up_bias,
        down_proj.permute(*order),
        down_bias,
        E=options.num_experts,
        activation_type=ActivationType[_NAMES[_plain_gate(options)]],
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=not options.is_interleaved,
        stream_id=None,
    )
    return out


def unsupported(
    hidden_states: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None, options: MoeOptions
) -> str | None:
    """Why sonic-moe cannot serve this call, in one sentence; None if it can."""
    reason = unavailable()
    if reason is not None:
        return f"{reason}."
    if not hidden_states.is_cuda or hidden_states.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16 on a GPU, found {hidden_states.dtype} on {hidden_states.device.type}."
    if options.post_expert_norm is not None:
        return "post_expert_norm is not supported."
    if (gate_up_bias is None) != (down_bias is None):
        return "one bias without the other is not supported."
    if _plain_gate(options) not in _NAMES:
        return f"its gates are {', '.join(_NAMES)} times up; activation={options.activation!r} is none of them."
    return None


def _plain_gate(options: MoeOptions) -> str:
    """The kind of a gate that is `kind(gate) * up` and nothing more; empty: it is another."""
    gate = options.recognised()
    plain = gate is not None and gate.is_gated and math.isinf(gate.limit) and gate.up_shift == 0 and gate.alpha == 1
    return gate.kind if gate is not None and plain else ""
