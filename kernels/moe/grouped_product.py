"""torch's grouped matrix product for every dtype, eager and inside torch.compile.

How `rows[r] @ weight[e]` for the rows of each expert, and its gradients, are computed:

    dtype, sizes                                     eager            inside torch.compile
    bf16, rows of whole 16 bytes                     F.grouped_mm     F.grouped_mm
    fp16 and fp32, rows of whole 16 bytes            F.grouped_mm     the operator below, which calls F.grouped_mm
    fp64, or other sizes, on the CPU                 the operator, expert by expert

torch's fake implementation of `grouped_mm` accepts only bf16 ("Expected inputs of BF16 type", torch 2.11 to 2.13), unlike
its kernels. A custom operator is opaque to tracing, so a layer compiles without graph breaks in every dtype.

Rows past the last end belong to no expert: the result is undefined there, and gradients skip them.

    R rows   E experts   K inner size   N output size
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRACED_DTYPE = torch.bfloat16
_ALIGNMENT = 16  # bytes


def grouped_product(rows_RK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """`[R, N]`: `rows[r] @ weight[e]` for the rows of each expert.

    Args:
        rows_RK: sorted by expert.
        weight_EKN: contiguous, or the transpose of a contiguous `[E, N, K]`.
        ends_E: int32, the end of each expert's rows.

    Raises:
        ValueError: on a GPU, a dtype or a row length that torch's grouped product does not take.
    """
    has_kernel = _has_kernel(rows_RK, weight_EKN.shape[2])
    if has_kernel and not _is_opaque(rows_RK):
        return F.grouped_mm(rows_RK, weight_EKN, offs=ends_E)
    if not has_kernel and rows_RK.device.type != "cpu":
        raise ValueError(
            f"fused_moe, backend 'torch': torch's grouped product takes bf16, fp16 and fp32 rows whose length is a "
            f"multiple of {_ALIGNMENT} bytes; found {rows_RK.dtype} with lengths "
            f"{(rows_RK.shape[1], weight_EKN.shape[2])}. Use fused_moe='eager' for this model, and "
            "experts_implementation='eager' for upstream's loop."
        )
    return torch.ops.patchgen.grouped_product(rows_RK, weight_EKN, ends_E)


def sum_per_expert(rows_RN: Tensor, ends_E: Tensor) -> Tensor:
    """`[E, N]`: the sum of each expert's rows, in a fixed order; a product with ones, on a GPU."""
    ones_R8 = rows_RN.new_ones(rows_RN.shape[0], 8)  # 8: the shortest row that the product takes in bf16
    if _is_opaque(rows_RN):
        return torch.ops.patchgen.grouped_outer_product(ones_R8, rows_RN, ends_E)[:, 0]
    return F.grouped_mm(ones_R8.T, rows_RN.contiguous(), offs=ends_E)[:, 0]


def _has_kernel(rows_RK: Tensor, *sizes: int) -> bool:
    aligned = all(size * rows_RK.element_size() % _ALIGNMENT == 0 for size in (rows_RK.shape[1], *sizes))
    return aligned and rows_RK.dtype in _KERNEL_DTYPES


def _is_opaque(rows_RK: Tensor) -> bool:
    """Whether torch.compile is tracing and cannot trace torch's product."""
    return torch.compiler.is_compiling() and rows_RK.dtype != _TRACED_DTYPE


# -------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("patchgen::grouped_product", mutates_args=())
def _grouped_product(rows_RK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    if _has_kernel(rows_RK, weight_EKN.shape[2]):
        return F.grouped_mm(rows_RK.contiguous(), weight_EKN, offs=ends_E).contiguous()
    out_RN = rows_RK.new_zeros(rows_RK.shape[0], weight_EKN.shape[2])
    for expert, (start, end) in enumerate(_ranges(ends_E)):
        out_RN[start:end] = rows_RK[start:end] @ weight_EKN[expert]
    return out_RN


@_grouped_product.register_fake
def _(rows_RK, weight_EKN, ends_E):
    return rows_RK.new_empty(rows_RK.shape[0], weight_EKN.shape[2])


@torch.library.custom_op("patchgen::grouped_outer_product", mutates_args=())
def _grouped_outer_product(rows_RK: Tensor, grad_RN: Tensor, ends_E: Tensor) -> Tensor:
    """`[E, K, N]`: `rows.T @ grad` over the rows of each expert."""
    if _has_kernel(rows_RK, grad_RN.shape[1]):
        return F.grouped_mm(rows_RK.contiguous().T, grad_RN.contiguous(), offs=ends_E).contiguous()
    out_EKN = rows_RK.new_zeros(ends_E.shape[0], rows_RK.shape[1], grad_RN.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends_E)):
        out_EKN[expert] = rows_RK[start:end].T @ grad_RN[start:end]
    return out_EKN


@_grouped_outer_product.register_fake
def _(rows_RK, grad_RN, ends_E):
    return rows_RK.new_empty(ends_E.shape[0], rows_RK.shape[1], grad_RN.shape[1])


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_product_backward(ctx, grad_RN):
    rows_RK, weight_EKN, ends_E = ctx.saved_tensors
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = torch.ops.patchgen.grouped_product(grad_RN.contiguous(), weight_EKN.transpose(1, 2), ends_E)
    if ctx.needs_input_grad[1]:
        grad_weight = torch.ops.patchgen.grouped_outer_product(rows_RK, grad_RN, ends_E)
    return grad_rows, grad_weight, None


_grouped_product.register_autograd(_grouped_product_backward, setup_context=_keep_inputs)


def _ranges(ends_E: Tensor) -> list[tuple[int, int]]:
    """The rows of each expert; for the CPU, because it reads the ends."""
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
