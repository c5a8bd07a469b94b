"""One gradient norm over all parameters on all meshes; clipping; non-finite gradients.

norm = gradients.clip(model, max_norm=1.0, optimizer=optimizer)
if gradients.accept(model, norm, on_nonfinite="skip"):
    optimizer.step()
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from patchgen.kernels.packages import failed_import
from patchgen.runtime.parallel import unused
from patchgen.runtime.parallel.collectives import all_reduce

logger = logging.getLogger(__name__)
POLICIES = ("skip", "stop")
LARGE = 2**20
"""From this many elements on, one kernel launch per gradient is faster than torch's foreach kernel."""


Parts = list[tuple[nn.Parameter, Tensor]]
"""Of parameters with a gradient, what their part of the norm was computed from, on this rank: not finite where the gradient, or
a square of it, is not. It outlives the gradients."""


class NonFiniteGradient(ArithmeticError):
    """A gradient is infinite or not a number."""


def norm(parameters: Iterable[nn.Parameter], parts: Parts | None = None) -> Tensor:
    """The 2-norm of all gradients of all ranks, a scalar fp32 tensor, the same on every rank.

    Squares are summed per layout (mesh, sharded dimensions, dtype), then over the sharded dimensions: replicas count once.

    Args:
        parts: a list that receives the parts of the norm.

    Raises:
        ValueError: no parameter has a gradient.
    """
    layouts: dict[tuple, list[Tensor]] = {}
    owners: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            sharded = tuple(
                dim
                for dim, placement in enumerate(gradient.placements)
                if not isinstance(placement, Replicate) and mesh.size(dim) > 1
            )
            # By dtype too: for mixed dtypes torch's foreach norm falls back to one norm at a time.
            layout, gradient = (mesh, sharded, gradient.dtype), gradient.to_local()
        else:
            layout = (None, (), gradient.dtype)
        layouts.setdefault(layout, []).append(gradient)
        owners.setdefault(layout, []).append(parameter)
    if not layouts:
        raise ValueError("No parameter has a gradient. To fix: call backward() first, or unfreeze a parameter.")
    squares = []
    for layout, gradients in layouts.items():
        mesh, sharded, _ = layout
        square, of_gradients = _sum_of_squares(gradients)
        if parts is not None:
            parts += zip(owners[layout], of_gradients, strict=True)
        if mesh is not None:
            square = square.to(mesh.device_type)
            for dim in sharded:
                square = all_reduce(square, group=mesh.get_group(dim), operation="sum the gradient norm")
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _sum_of_squares(gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The sum of squares of gradients of one dtype on one device, a scalar fp32 tensor, and what of each gradient it was summed
    from."""
    is_large = [
        gradient.numel() >= LARGE and gradient.is_contiguous() and _has_kernel(gradient) for gradient in gradients
    ]
    large = [gradient for gradient, belongs in zip(gradients, is_large, strict=True) if belongs]
    small = [gradient for gradient, belongs in zip(gradients, is_large, strict=True) if not belongs]
    sums, of_large, of_small = [], (), []
    if large:
        all_parts, of_large = _squares_by_kernel(large)
        sums.append(all_parts.sum())
    if small:
        # torch does not export its foreach functions by type.
        norms = torch._foreach_norm(small, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        of_small = list(norms)
        sums.append(torch.stack(of_small).square().sum())
    each_large, each_small = iter(of_large), iter(of_small)
    return sum(sums[1:], sums[0]), [next(each_large if belongs else each_small) for belongs in is_large]


def _has_kernel(gradient: Tensor) -> bool:
    return gradient.is_cuda and failed_import("triton") is None


def _squares_by_kernel(large: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    from patchgen.kernels.optimizer.squares import partial_sums  # loads Triton

    return partial_sums(large)


@torch.no_grad()
def clip(
    model: nn.Module, max_norm: float, *, optimizer: Optimizer | None = None, parts: Parts | None = None
) -> Tensor:
    """Scales all gradients by `max_norm / norm` if that is less than 1; returns the norm before clipping. No host sync.

    With a non-finite norm nothing is scaled, so that `accept` can still find the non-finite gradient.

    Args:
        optimizer: one with a `gradient_factor` (`train/adamw.py`) multiplies by it in its step; its gradients are not scaled.
        parts: as of `norm`.

    Raises:
        ValueError: gradients narrower than their parameters, which scaling would round, without such an optimizer.
    """
    pairs = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    total = norm((parameter for parameter, _ in pairs), parts)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    factor = torch.where(torch.isfinite(total), factor, 1.0)
    scaled_by_optimizer = _set_gradient_factor(optimizer, factor)
    pairs = [(parameter, gradient) for parameter, gradient in pairs if id(parameter) not in scaled_by_optimizer]
    narrow = [(wide, gradient) for wide, gradient in pairs if gradient.dtype.itemsize < wide.dtype.itemsize]
    if narrow:
        wide, gradient = narrow[0]
        raise ValueError(
            f"{len(narrow)} gradients are {gradient.dtype} while their parameters are {wide.dtype}: scaling would round "
            "them, so the optimizer has to multiply by the factor. To fix: call clip(model, max_norm, optimizer=optimizer)."
        )
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for _, gradient in pairs]
    if local:
        torch._foreach_mul_(local, factor.to(local[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return total


def _set_gradient_factor(optimizer: Optimizer | None, factor: Tensor) -> set[int]:
    """Passes the factor to optimizers that multiply by it themselves; returns the ids of their parameters."""
    parameter_ids: set[int] = set()
    parts: Any = getattr(optimizer, "parts", (optimizer,))  # optimizers of any class
    for part in parts:
        if hasattr(part, "gradient_factor"):
            part.gradient_factor = factor
            parameter_ids |= {id(parameter) for group in part.param_groups for parameter in group["params"]}
    return parameter_ids


def accept(model: nn.Module, total: Tensor, *, on_nonfinite: str) -> bool:
    """Whether to take the step; the same on every rank, and every rank must call it. One host sync, to read the norm.

    Afterwards parameters that no rank used have no gradient (`unused.py`).

    Args:
        total: what `clip` or `norm` returned.
        on_nonfinite: "skip": log which parameter it was and return False; "stop": raise.

    Raises:
        NonFiniteGradient: with "stop".
        RuntimeError: the ranks ran different modules.
    """
    if on_nonfinite not in POLICIES:
        raise ValueError(f"on_nonfinite must be one of {', '.join(POLICIES)}; found '{on_nonfinite}'.")
    unused.drop_unused_gradients(model)
    if bool(torch.isfinite(total)):
        return True
    report_nonfinite(model, float(total), on_nonfinite=on_nonfinite)
    return False


def report_nonfinite(model: nn.Module, total: float, *, on_nonfinite: str, parts: Parts | None = None) -> None:
    """Says which gradient made a norm that is not finite (collective): in the log with "skip", as an error with "stop".

    Args:
        parts: of the norm, if the gradients are gone.

    Raises:
        NonFiniteGradient: with "stop".
    """
    name = first_nonfinite(model, parts)
    message = (
        f"The gradient norm is {total}. The first parameter with a gradient that is not finite"
        f"{'' if parts is None else ', or too large to be squared'}: {name or 'none (the norm itself overflowed)'}."
    )
    if on_nonfinite == "stop":
        raise NonFiniteGradient(f"{message} The step was not taken.")
    logger.warning("%s This step is skipped.", message)


def first_nonfinite(model: nn.Module, parts: Parts | None = None) -> str | None:
    """The first parameter, in model order, with a non-finite gradient on any rank; `parts` as of `report_nonfinite`."""
    names, parameters = zip(*model.named_parameters(), strict=True)  # all of them: ranks may have different gradients
    known = None if parts is None else {id(parameter): part for parameter, part in parts}
    first, device = len(names), None
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad if known is None else known.get(id(parameter))
        if gradient is None:
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        device = device or (parameter.device_mesh.device_type if isinstance(parameter, DTensor) else local.device)
        if not bool(torch.isfinite(local).all()):
            first = index
            break
    if dist.is_initialized():
        local_first = torch.tensor(first, device=device)
        first = int(all_reduce(local_first, op=dist.ReduceOp.MIN, operation="find the first non-finite gradient"))
    return names[first] if first < len(names) else None
