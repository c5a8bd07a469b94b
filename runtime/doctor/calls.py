"""Runs a model as the trainer does, on one rank: its loss, logits and gradients for a packed row.

Arguments named `kernels` map seams to the implementations that run there; every other seam runs eager code.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime import attention_kinds, parallel, seams
from patchgen.runtime.parallel import loss as losses
from patchgen.runtime.parallel.batch import IGNORED, slice_batch
from patchgen.runtime.parallel.selfcheck import HALF_PRECISION_TOLERANCE, TOLERANCE
from patchgen.runtime.train.feed import to_device
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.training_inputs import without_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EAGER_ATTENTION = "patchgen_eager"
"""The attention formula in plain torch, separating the documents of packed rows."""


def model_inputs(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A packed row as the trainer passes it to the model, on the device."""
    return to_device(slice_batch(dict(row), sp=1, sp_rank=0), device)


@contextlib.contextmanager
def using_kernels(kernels: Mapping[str, str]) -> Iterator[None]:
    """Selects these kernels, eager code for every other seam, and a single rank."""
    with all_eager(), seams.using(**kernels), parallel.using(None):
        yield


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Selects eager attention for the model."""
    before = attention_kinds.named_in(model.config)
    model.set_attn_implementation(EAGER_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before if isinstance(before, str) else dict(before))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switches dropout off. The head itself keeps its mode, because it treats labels differently in training mode."""
    before = model.training
    for inner in model.children():
        inner.eval()
    try:
        yield
    finally:
        model.train(before)


def loss(model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]) -> float:
    """The mean loss per label of a packed row, without router loss or dropout."""
    with torch.no_grad(), without_dropout(model):
        return float(_loss(model, row, kernels))


@dataclass(frozen=True)
class GradientSummary:
    """What is kept of a parameter's gradient.

    Attributes:
        is_zero: whether every element is 0.
        transposition_gains: how much transposing each square matrix of the parameter would lower the loss, to first order.
    """

    norm: float
    is_zero: bool
    transposition_gains: tuple[float, ...] = ()


def gradient_summaries(
    model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]
) -> dict[str, GradientSummary]:
    """A summary of each parameter's gradient for a row; gradients are freed as soon as they are summarised."""
    summaries: dict[str, GradientSummary] = {}
    model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as hooks:
        for name, p in model.named_parameters():
            if p.requires_grad:
                hook = functools.partial(_summarise, name, summaries)
                hooks.enter_context(p.register_post_accumulate_grad_hook(hook))
        loss = _loss(model, row, kernels)
        with using_kernels(kernels):  # also when layers are recomputed
            loss.backward()
    return summaries


@torch.no_grad()
def _summarise(name: str, summaries: dict[str, GradientSummary], parameter: nn.Parameter) -> None:
    gradient, gains = parameter.grad, ()
    assert gradient is not None, "the hook runs after accumulation"
    if parameter.ndim > 1 and parameter.shape[-1] == parameter.shape[-2]:
        weights, gradients = (
            matrices.reshape(-1, *matrices.shape[-2:]) for matrices in (parameter.detach(), gradient)
        )
        gains = tuple(
            -float((matrix_gradient.float() * (weight.mT - weight).float()).sum())
            for weight, matrix_gradient in zip(weights, gradients, strict=True)
        )
    summaries[name] = GradientSummary(float(gradient.float().norm()), not bool(gradient.any()), gains)
    parameter.grad = None


def _loss(model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]) -> Tensor:
    inputs = model_inputs(row, next(model.parameters()).device)
    num_items = (inputs["shift_labels"] != IGNORED).sum().clamp(min=1)
    with using_kernels(kernels), losses.step(num_items, router_loss=False):
        return model(**inputs, num_items_in_batch=num_items, use_cache=False).loss


@torch.no_grad()
def logits(model: nn.Module, row: Mapping[str, Any], kernels: Mapping[str, str]) -> Tensor:
    """The logits `(S, V)` of a packed row of S tokens, over V tokens of the vocabulary, on the CPU in fp32, without dropout."""
    inputs = without_labels(model_inputs(row, next(model.parameters()).device))
    with using_kernels(kernels), without_dropout(model):
        return model(**inputs, use_cache=False).logits[0].float().cpu()


def difference(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of `expected`; infinite instead of NaN."""
    actual, expected = actual.double(), expected.double()
    relative = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return float("inf") if math.isnan(relative) else relative


def tolerance(dtype: torch.dtype) -> float:
    """How far rounding may move two computations of the same value apart."""
    return TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE)
