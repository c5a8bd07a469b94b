"""What each rank does in the tests of FP8 on ranks; see test_fp8_on_ranks.py.

T tokens   K inputs   N outputs   E experts   H hidden size   I expert intermediate size
"""

from __future__ import annotations

import interpreter_loops  # noqa: F401  a rank loads no conftest
import pytest
import torch
import torch.distributed as dist
from cases_trainer import train
from interpreted_fp8 import patch
from torch import Tensor

from patchgen.kernels.linear import fp8_linear
from patchgen.kernels.moe import fp8_reference
from patchgen.runtime.train.records import Summary

TOKENS, INPUTS, OUTPUTS = 96, 64, 48
EXPERTS, INNER = 2, 32


def train_with_kernels(values: dict) -> tuple[list[float], list[float], Summary]:
    """As `cases_trainer.train`, with Triton kernels in its interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        patch(patched)
        return train(values)


def tokens(columns: int, seed: int) -> Tensor:
    """`[T, columns]`, integers of three bits, of all tokens but the first times 2^-7 to 2^-9."""
    integers = torch.randint(-7, 8, (TOKENS, columns), generator=torch.Generator().manual_seed(seed)).float()
    exponents = 7 + torch.arange(TOKENS).remainder(3)
    exponents[0] = 0
    return integers * 2.0 ** -exponents[:, None]


def of_rank(values: Tensor) -> Tensor:
    return values.chunk(dist.get_world_size())[dist.get_rank()]


def linear_gradient(narrow: bool) -> Tensor:
    """The weight gradient `[N, K]` of a linear layer in FP8, each rank's tokens by themselves, summed over the ranks."""
    x, grad = (of_rank(tokens(columns, seed)) for columns, seed in ((INPUTS, 1), (OUTPUTS, 2)))
    weight = torch.ones(OUTPUTS, INPUTS).requires_grad_()
    fp8_linear.fp8_linear(x, weight, narrow_gradient=narrow).backward(grad)
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad


def _added(h: Tensor) -> Tensor:
    return h[:, :INNER] + h[:, INNER:]


def expert_gradients() -> tuple[Tensor, Tensor, list[float]]:
    """The gradients of gate_up `[E, 2I, H]` and down `[E, H, I]`, each rank's tokens by themselves, summed over the ranks; and the
    largest folded scales that this rank met, of the first and of the second.

    All sums before those over rows are of small integers, and so exact in any order: the rows of both factors have the
    same bits on any number of ranks.
    """
    generator = torch.Generator().manual_seed(3)
    x, grad = (of_rank(tokens(INPUTS, seed)).requires_grad_() for seed in (1, 2))
    index = of_rank(torch.randint(EXPERTS, (TOKENS, 1), generator=generator))
    stacks = [
        torch.randint(-1, 2, shape, generator=generator).float().requires_grad_()
        for shape in ((EXPERTS, 2 * INNER, INPUTS), (EXPERTS, INPUTS, INNER))
    ]
    largest = {INNER: 0.0, 2 * INNER: 0.0}

    def noted(values: Tensor, factors: Tensor, fold=fp8_reference.fold) -> tuple[Tensor, Tensor]:
        largest[values.shape[1]] = max(largest[values.shape[1]], float(factors.amax()))
        return fold(values, factors)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fp8_reference, "fold", noted)
        out = fp8_reference.fp8_reference(x, index, torch.ones(len(x), 1), *stacks, gate=_added)
        out.backward(grad.detach())
    gradients = [stack.grad for stack in stacks]
    for gradient in gradients:
        assert gradient is not None
        dist.all_reduce(gradient)
    return gradients[0], gradients[1], [largest[2 * INNER], largest[INNER]]
