"""The gates of expert layers: their formulas, and which one a model's own function computes.

A kernel cannot call a Python function of the model, so it must know what the function computes. Names are not enough:
upstream classes of one name differ between releases, and one formula has many names. So the function is evaluated on
some 200 fp32 probe values and compared with each formula of this file. A function that matches none is reported as unknown,
never approximated.

    R rows   I expert intermediate size
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.kernels.bypassed_modules import addition

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_PROBE_LIMIT = 1e4
_TOLERANCE = 2e-6


@dataclass(frozen=True)
class Activation:
    """One gate: `activate(min(gate, limit)) * (clamp(up, -limit, limit) + up_shift)`.

    Attributes:
        kind: one of `KINDS`.
        alpha: the slope inside silu: `gate * sigmoid(alpha * gate)`.
        limit: infinity for no clamp.
        up_shift: 1.0 for gpt_oss and its relatives, 0.0 elsewhere.
        limit_after: the gate is clamped after the activation, not before (step3p7).
        is_gated: False: `activate(x)` of the full projection.
    """

    kind: str = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    up_shift: float = 0.0
    limit_after: bool = False
    is_gated: bool = True

    def activate(self, gate: Tensor) -> Tensor:
        """The elementwise function, in the dtype of `gate`."""
        if self.kind == "silu":
            return nn.functional.silu(gate) if self.alpha == 1.0 else gate * torch.sigmoid(self.alpha * gate)
        if self.kind == "gelu":
            return nn.functional.gelu(gate)
        if self.kind == "gelu_tanh":
            return nn.functional.gelu(gate, approximate="tanh")
        if self.kind == "relu":
            return nn.functional.relu(gate)
        return nn.functional.relu(gate).square()

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated activation; `gate` and `up` are `[R, I]`."""
        if not math.isinf(self.limit):
            up = up.clamp(-self.limit, self.limit)
            if not self.limit_after:
                gate = gate.clamp(max=self.limit)
        activated = self.activate(gate)
        if self.limit_after:
            activated = activated.clamp(max=self.limit)
        return activated * (up + self.up_shift if self.up_shift else up)


def split_gate_up(gate_up: Tensor, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    """`[R, 2I]` to gate and up, `[R, I]` each."""
    if is_interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def apply(
    gate_up: Tensor,
    activation: Callable[[Tensor], Tensor] | None,
    apply_gate: Callable[[Tensor], Tensor] | None,
    is_gated: bool,
    is_interleaved: bool,
) -> Tensor:
    """The model's own gate on `gate_up [R, 2I]` (`[R, I]` without a gate); returns `[R, I]`.

    Raises:
        ValueError: neither `activation` nor `apply_gate` was given.
    """
    if apply_gate is not None:
        return apply_gate(gate_up)
    if activation is None:
        raise ValueError(
            "fused_moe got neither `activation` nor `apply_gate`. To fix: pass the experts' activation function (their "
            "`act_fn`), or the function that maps [rows, 2I] to [rows, I]."
        )
    if not is_gated:
        return activation(gate_up)
    gate, up = split_gate_up(gate_up, is_interleaved)
    return activation(gate) * up


def recognise(
    activation: Callable[[Tensor], Tensor] | None,
    apply_gate: Callable[[Tensor], Tensor] | None,
    is_gated: bool,
    is_interleaved: bool,
) -> Activation | None:
    """The formula that the model's function computes, or None if it is none of ours.

    Common activation modules are recognised by their type; one with a hook or another forward is none of ours. Anything else is
    probed once per function and cached: a model that changes its clamp after the first call is not noticed. torch.compile runs the
    probe while tracing and treats the result as a constant (for modules from torch 2.13; fails on 2.11), for which a bound method
    is split into its parts.
    """
    if isinstance(activation, nn.Module) and addition(activation) is not None:
        return None
    if apply_gate is None and (type(activation), is_gated) in _KNOWN_TYPES:
        return _KNOWN_TYPES[type(activation), is_gated]
    if apply_gate is None and type(activation) is nn.GELU:
        return Activation("gelu" if activation.approximate == "none" else "gelu_tanh", is_gated=is_gated)
    if apply_gate is None:
        return _recognise(activation, None, is_gated, is_interleaved)
    if isinstance(apply_gate, MethodType):
        return _recognise(apply_gate.__self__, apply_gate.__name__, is_gated, is_interleaved)
    return _recognise(apply_gate, "", is_gated, is_interleaved)


def _known_types() -> dict[tuple[type, bool], Activation]:
    """torch's and transformers' activation modules without parameters, by type, with and without a gate."""
    from transformers.activations import ACT2CLS

    upstream = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
    types = {nn.SiLU: "silu", nn.ReLU: "relu"}
    types |= {ACT2CLS[name]: kind for name, kind in upstream.items() if isinstance(ACT2CLS[name], type)}
    return {(kind, gated): Activation(types[kind], is_gated=gated) for kind in types for gated in (True, False)}


_KNOWN_TYPES = _known_types()
_RECOGNISED: weakref.WeakKeyDictionary[object, dict[tuple, Activation | None]] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _recognise(owner: Any, method: str | None, is_gated: bool, is_interleaved: bool) -> Activation | None:
    """`method`: None for an activation function, "" for a gate function, else the name of the owner's gate method."""
    if owner is None:
        return None
    formulas = _RECOGNISED.setdefault(owner, {})
    key = (method, is_gated, is_interleaved)
    if key not in formulas:
        with torch.no_grad(), torch.device("cpu"):
            formulas[key] = _probe(owner, method, is_gated, is_interleaved)
    return formulas[key]


def _probe(owner: Any, method: str | None, is_gated: bool, is_interleaved: bool) -> Activation | None:
    function = getattr(owner, method) if method else owner
    if _is_learned(owner, function, is_gated and method is not None):
        return None  # it changes during training
    if not is_gated:
        return _match(lambda gate, up: function(gate), is_gated=False)
    if method is None:
        return _match(lambda gate, up: owner(gate) * up, is_gated=True)

    def gate_of_pairs(gate: Tensor, up: Tensor) -> Tensor:
        pairs = torch.stack((gate, up), dim=-1) if is_interleaved else torch.stack((gate, up), dim=0)
        return function(pairs.reshape(1, -1)).reshape(-1)

    return _match(gate_of_pairs, is_gated=True)


def _is_learned(owner: object, function: Callable[[Tensor], Tensor], is_gated: bool) -> bool:
    """Whether the result depends on a parameter: a learned activation, or a gate with a learned scalar."""
    if function is owner and isinstance(owner, nn.Module):
        return any(True for _ in owner.parameters())
    with torch.enable_grad():
        return getattr(function(torch.ones(1, 2 if is_gated else 1)), "requires_grad", False)


def _match(function: Callable[[Tensor, Tensor], Tensor], is_gated: bool) -> Activation | None:
    """Solves for limit, shift and alpha at a few points, then compares every formula on a grid."""

    def at(gate: float, up: float) -> float:
        return float(function(torch.tensor([gate]), torch.tensor([up])))

    if is_gated:
        # Where the gate is 1 the result is linear in up between the clamps: activate(1) * (up + shift).
        at_zero, at_one = at(1.0, 0.0), at(1.0, 1.0)
        slope = at_one - at_zero
        if not math.isfinite(slope) or slope == 0.0:
            return None
        shift = round(at_zero / slope, 4)
        reach = at(1.0, _PROBE_LIMIT) / slope - shift
        limit = math.inf if reach > 0.99 * _PROBE_LIMIT else float(f"{reach:.6g}")
    else:
        slope, shift, limit = at(1.0, 0.0), 0.0, math.inf
    gate = torch.cat((torch.linspace(-9.7, 9.7, 195), torch.tensor([-80.0, -31.0, -14.0, 14.0, 31.0, 80.0])))
    up = torch.linspace(-8.3, 9.1, 201)[torch.randperm(201, generator=torch.Generator().manual_seed(0))]
    output = function(gate, up)
    if not isinstance(output, Tensor) or output.shape != gate.shape or not bool(torch.isfinite(output).all()):
        return None
    alpha = round(math.log(slope / (1.0 - slope)), 5) if 0.0 < slope < 1.0 else 1.0
    scale = output.abs().max().clamp(min=1.0)
    for kind in KINDS:
        for limit_after in (False,) if math.isinf(limit) else (False, True):
            candidate = Activation(
                kind=kind,
                alpha=alpha if kind == "silu" else 1.0,
                limit=limit,
                up_shift=shift,
                limit_after=limit_after,
                is_gated=is_gated,
            )
            expected = candidate.gate(gate, up) if is_gated else candidate.activate(gate)
            if bool(((output - expected).abs() <= _TOLERANCE * scale + 1e-5 * expected.abs()).all()):
                return candidate
    return None
