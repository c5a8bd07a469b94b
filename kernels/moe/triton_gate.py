"""The gates of `kernels/elementwise/activations.py` inside Triton kernels: value and derivatives, elementwise in fp32.

A gate is passed to the kernels as compile-time constants (`GATE_*`), one compiled kernel per gate. The derivatives
follow torch's conventions at the corners: a clamp passes the gradient on its bounds, relu' (0) = 0.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from patchgen.kernels.elementwise.activations import KINDS, Activation

SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(number) for number in range(len(KINDS)))
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_INV_SQRT_TWO_PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_SQRT_TWO_OVER_PI = tl.constexpr(math.sqrt(2.0 / math.pi))
_GELU_CUBIC = tl.constexpr(0.044715)
_LOG2_E = tl.constexpr(math.log2(math.e))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def gate_constants(activation: Activation) -> dict[str, object]:
    """The keyword arguments that a kernel with a gate takes."""
    return {
        "GATE_KIND": KINDS.index(activation.kind),
        "GATE_ALPHA": activation.alpha,
        "GATE_LIMIT": None if math.isinf(activation.limit) else activation.limit,
        "GATE_SHIFT": activation.up_shift,
        "GATE_LIMIT_AFTER": activation.limit_after,
    }


@triton.jit
def sigmoid(x):
    """`1 / (1 + exp(-x))` in four instructions.

    The compiler's own form spends a dozen on subnormal exponentials and quotients, whose sigmoids are 1 and 0 anyway,
    and the epilogues wait for their instructions. Errors are of some 2^-22.
    """
    if _INTERPRETED:
        return tl.sigmoid(x)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=r,r",
            [x * -_LOG2_E],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def activate(x, GATE_KIND: tl.constexpr, GATE_ALPHA: tl.constexpr):
    if GATE_KIND == SILU:
        return x * sigmoid(GATE_ALPHA * x)
    elif GATE_KIND == GELU:
        return 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif GATE_KIND == GELU_TANH:
        return x * sigmoid(2.0 * _SQRT_TWO_OVER_PI * (x + _GELU_CUBIC * x * x * x))
    elif GATE_KIND == RELU:
        return tl.maximum(x, 0.0)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive


@triton.jit
def activate_with_derivative(x, GATE_KIND: tl.constexpr, GATE_ALPHA: tl.constexpr):
    """`(activate(x), activate'(x))`."""
    if GATE_KIND == SILU:
        share = sigmoid(GATE_ALPHA * x)
        value = x * share
        return value, share + GATE_ALPHA * value * (1.0 - share)
    elif GATE_KIND == GELU:
        share = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
        return x * share, share + x * _INV_SQRT_TWO_PI * tl.exp(-0.5 * x * x)
    elif GATE_KIND == GELU_TANH:
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z)
        share = sigmoid(2.0 * _SQRT_TWO_OVER_PI * (x + _GELU_CUBIC * x * x * x))
        slope = 2.0 * _SQRT_TWO_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * x * x)
        value = x * share
        return value, share + value * (1.0 - share) * slope
    elif GATE_KIND == RELU:
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive


@triton.jit
def gate_forward(
    gate,
    up,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    """`activate(clamp(gate)) * (clamp(up) + shift)`; with `GATE_LIMIT_AFTER`, `clamp(activate(gate))` is the first factor."""
    if GATE_LIMIT is not None:
        up = tl.minimum(tl.maximum(up, -GATE_LIMIT), GATE_LIMIT)
        if not GATE_LIMIT_AFTER:
            gate = tl.minimum(gate, GATE_LIMIT)
    value = activate(gate, GATE_KIND, GATE_ALPHA)
    if GATE_LIMIT is not None and GATE_LIMIT_AFTER:
        value = tl.minimum(value, GATE_LIMIT)
    if GATE_SHIFT != 0.0:
        up += GATE_SHIFT
    return value * up


@triton.jit
def gate_backward(
    gate,
    up,
    GATE_KIND: tl.constexpr,
    GATE_ALPHA: tl.constexpr,
    GATE_LIMIT: tl.constexpr,
    GATE_SHIFT: tl.constexpr,
    GATE_LIMIT_AFTER: tl.constexpr,
):
    """`(value, d value / d gate, d value / d up)`."""
    clamped_gate = gate
    clamped_up = up
    if GATE_LIMIT is not None:
        clamped_up = tl.minimum(tl.maximum(up, -GATE_LIMIT), GATE_LIMIT)
        if not GATE_LIMIT_AFTER:
            clamped_gate = tl.minimum(gate, GATE_LIMIT)
    activated, slope = activate_with_derivative(clamped_gate, GATE_KIND, GATE_ALPHA)
    if GATE_LIMIT is not None:
        if GATE_LIMIT_AFTER:
            slope = tl.where(activated <= GATE_LIMIT, slope, 0.0)
            activated = tl.minimum(activated, GATE_LIMIT)
        else:
            slope = tl.where(gate <= GATE_LIMIT, slope, 0.0)
    shifted_up = clamped_up
    if GATE_SHIFT != 0.0:
        shifted_up += GATE_SHIFT
    d_up = activated
    if GATE_LIMIT is not None:
        d_up = tl.where(tl.abs(up) <= GATE_LIMIT, activated, 0.0)
    return activated * shifted_up, slope * shifted_up, d_up
