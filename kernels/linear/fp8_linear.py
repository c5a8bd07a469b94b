"""A linear layer whose products are in FP8 (e4m3): forward and input gradient, and its weight gradient if asked for.

    forward    x to FP8, once for all layers that read it, weight to FP8 -> y = x @ weight^T
    backward   dy to FP8, weight to FP8 with its other side last         -> dx = dy @ weight
               dy^T @ x in the layer's dtype, or of both in FP8          -> dweight

Parameters, their names and gradients, inputs and outputs are those of `nn.Linear`. Scales are of a token or of a row of the
weight, so they depend on no layout of ranks; but weight gradients in FP8 are rounded to the largest factor of a rank's tokens. On a
GPU `fp8_products` computes, on a CPU `fp8_reference`, which rounds in the same places. The same inputs give the same bits.

    T tokens   K inputs   N outputs
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

MULTIPLE = 16
"""Of which inputs and outputs of a layer are multiples: torch's products in FP8 read 16 bytes at a time."""


class Fp8Linear(nn.Linear):
    """What `nn.Linear` becomes by `convert`.

    Attributes:
        has_narrow_gradient: whether the weight gradient is computed in FP8, too.
        is_exact: computes as `nn.Linear` as long as it is set.
    """

    has_narrow_gradient: bool
    is_exact: bool

    def forward(self, input: Tensor) -> Tensor:
        if self.is_exact:
            return functional.linear(input, self.weight, self.bias)
        return fp8_linear(input, self.weight, self.bias, narrow_gradient=self.has_narrow_gradient)


def convert(linear: nn.Linear, *, narrow_gradient: bool = False) -> None:
    """Lets a linear layer compute in FP8, in place: parameters, names and hooks stay."""
    if reason := unsupported(linear):
        raise ValueError(reason)
    linear.__class__ = Fp8Linear
    assert isinstance(linear, Fp8Linear)
    linear.has_narrow_gradient, linear.is_exact = narrow_gradient, False


def unsupported(linear: nn.Linear) -> str | None:
    """Why a layer cannot compute in FP8, in one sentence; None if it can."""
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__qualname__} may compute something else than nn.Linear."
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"{linear.in_features} inputs and {linear.out_features} outputs are not both multiples of {MULTIPLE}."
    return None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, narrow_gradient: bool = False) -> Tensor:
    """`x @ weight^T + bias` for `x [..., K]` and `weight [N, K]`, in the dtype of x.

    Args:
        narrow_gradient: the weight gradient is a product in FP8, too.
    """
    if _is_traced():
        values, scales = torch.ops.patchgen.fp8_rows(x.detach())
        return torch.ops.patchgen.fp8_linear(x, weight, bias, values, scales, narrow_gradient)[0]
    return _Linear.apply(x, weight, bias, *_rows_of(x), narrow_gradient)


def _is_traced() -> bool:
    """Whether the compiler looks at operators, or selective checkpointing, which keeps what they return. Else they would only cost
    the host time."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


# ------------------------------------------------------------------------------ inputs that several layers read

_last: tuple[weakref.ref[Tensor], tuple[int, int, bool], tuple[Tensor, Tensor]] | None = None
"""The last input, what `_state_of` said of it, and its rows: q, k and v are given the same tensor."""


def _state_of(x: Tensor) -> tuple[int, int, bool]:
    """What changes when x is written, or given other memory; and whether a CUDA graph is captured.

    What writes into the memory of x without telling autograd, `x.data.mul_(2)` or a kernel by its address, changes nothing
    here, between two layers that read x. The gradients of `nn.Linear` would be wrong then, too: it saves x, and autograd sees
    by the same version that it is as it was.
    """
    return x._version, x.data_ptr(), x.is_cuda and torch.cuda.is_current_stream_capturing()


def _rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    global _last
    if x.is_inference():
        return _quantised(x)
    state = _state_of(x)
    if _last is not None and _last[0]() is x and _last[1] == state:
        return _last[2]
    found = _quantised(x.detach())
    _last = weakref.ref(x), state, found
    return found


# ----------------------------------------------------------------------------------------------- what they compute


def _products(tensor: Tensor) -> ModuleType:
    if tensor.is_cuda:
        from patchgen.kernels.linear import fp8_products  # loads Triton

        return fp8_products
    from patchgen.kernels.linear import fp8_reference

    return fp8_reference


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [..., K]` in FP8, as `[T, K]`, and the scales of its tokens `[T]`."""
    tokens = x.reshape(-1, x.shape[-1])
    return _products(x).rows(tokens) if tokens.numel() else _empty_rows(tokens)


def _empty_rows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    return (
        tokens.new_empty(tokens.shape, dtype=torch.float8_e4m3fn),
        tokens.new_empty(tokens.shape[:1], dtype=torch.float32),
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`([..., N], the scales of the weight's rows [N])` of the rows of x in FP8."""
    products = _products(x)
    weight_values, weight_scales = products.rows(weight)
    if not values.numel():
        return x.new_empty(*x.shape[:-1], weight.shape[0]), weight_scales
    out = products.product(values, scales, weight_values, weight_scales, bias, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0]), weight_scales


def _gradients(
    grad: Tensor, x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x `[T, K]`, weight and bias, in this order; None if not `needed`.

    Args:
        grad: `[..., N]`.
        x, x_scales: `[..., K]` and None, or the rows `[T, K]` in FP8 and their scales.
    """
    need_x, need_weight, need_bias = needed
    grads, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    if not grads.numel():
        shapes = x.shape, weight.shape, weight.shape[:1]
        return [grad.new_zeros(shape) if need else None for shape, need in zip(shapes, needed, strict=True)]
    of_x = of_weight = of_bias = None
    products, is_narrow = _products(grad), x_scales is not None
    if need_x or (need_weight and is_narrow):
        values, scales = products.rows(grads)
        if need_x:
            of_x = products.product(values, scales, *products.other_side(weight, weight_scales), None, grad.dtype)
        if need_weight and is_narrow:
            of_weight = products.weight_gradient(values, scales, x, x_scales, grad.dtype)
    if need_weight and not is_narrow:
        of_weight = grads.t() @ x
    if need_bias:
        of_bias = grads.sum(0)
    return [of_x, of_weight, of_bias]


def _save(ctx, inputs: tuple, weight_scales: Tensor) -> None:
    x, weight, bias, values, scales, narrow_gradient = inputs
    ctx.shape, ctx.has_bias = x.shape, bias is not None
    ctx.save_for_backward(*((values, scales) if narrow_gradient else (x, None)), weight, weight_scales)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: Tensor | None, gradients: Callable) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    needed = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
    x, weight, bias = gradients(grad, *ctx.saved_tensors, needed)
    return None if x is None else x.view(ctx.shape), weight, bias, None, None, None


class _Linear(torch.autograd.Function):
    """With the context in its forward: torch inspects signatures in each call of one that has `setup_context`."""

    @staticmethod
    def forward(ctx, *inputs) -> Tensor:
        x, weight, bias, values, scales, _ = inputs
        out, weight_scales = _forward(x, weight, bias, values, scales)
        _save(ctx, inputs, weight_scales)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _backward(ctx, grad, _gradients)


# ------------------------------------------------------------------------------------------- the same as operators


@torch.library.custom_op("patchgen::fp8_rows", mutates_args=())
def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantised(x)


@_fp8_rows.register_fake
def _(x):
    return _empty_rows(x.reshape(-1, x.shape[-1]))


@torch.library.custom_op("patchgen::fp8_linear", mutates_args=())
def _fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor, narrow_gradient: bool
) -> tuple[Tensor, Tensor]:
    return _forward(x, weight, bias, values, scales)


@_fp8_linear.register_fake
def _(x, weight, bias, values, scales, narrow_gradient):
    return x.new_empty(*x.shape[:-1], weight.shape[0]), weight.new_empty(weight.shape[:1], dtype=torch.float32)


@torch.library.custom_op("patchgen::fp8_linear_backward", mutates_args=())
def _fp8_linear_backward(
    grad: Tensor, x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, needed: list[bool]
) -> list[Tensor]:
    found = _gradients(grad, x, x_scales, weight, weight_scales, needed)
    return [grad.new_empty(0) if one is None else one for one in found]  # an operator's outputs may not share memory


@_fp8_linear_backward.register_fake
def _(grad, x, x_scales, weight, weight_scales, needed):
    shapes = (grad.numel() // grad.shape[-1], x.shape[-1]), weight.shape, weight.shape[:1]
    return [grad.new_empty(shape if need else 0) for shape, need in zip(shapes, needed, strict=True)]


def _gradients_by_operator(*inputs) -> list[Tensor | None]:
    found = torch.ops.patchgen.fp8_linear_backward(*inputs)
    return [one if need else None for one, need in zip(found, inputs[-1], strict=True)]


def _setup_context(ctx, inputs, output) -> None:
    _save(ctx, inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_of_operator(ctx, grad, _weight_scales):
    return _backward(ctx, grad, _gradients_by_operator)


_fp8_linear.register_autograd(_backward_of_operator, setup_context=_setup_context)
