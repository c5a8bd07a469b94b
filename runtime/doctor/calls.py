"""A model called as the trainer calls it, on one rank, and as plain code would."""

from __future__ import annotations

import contextlib
import functools
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
"""Attention as its formula stands, with the documents of packed rows."""


def handed(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A packed row as the trainer hands it to the model, on the device."""
    return to_device(slice_batch(dict(row), sp=1, sp_rank=0), device)


@contextlib.contextmanager
def selected(chosen: Mapping[str, str]) -> Iterator[None]:
    """These kernels, every other seam eager, no other rank."""
    with all_eager(), seams.using(**chosen), parallel.using(None):
        yield


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model attends by the formula."""
    before = attention_kinds.named_in(model.config)
    model.set_attn_implementation(EAGER_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before if isinstance(before, str) else dict(before))


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Without dropout, whose dice would make any two calls differ. The head itself stays as it is: what it does with labels
    is that of a run in training alone."""
    before = model.training
    for inner in model.children():
        inner.eval()
    try:
        yield
    finally:
        model.train(before)


def loss(model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]) -> float:
    """The mean loss per label of a packed row, without that of routers and without dropout."""
    with torch.no_grad(), evaluated(model):
        return float(_loss(model, row, chosen))


@dataclass(frozen=True)
class Slope:
    """What is kept of a parameter's gradient.

    Attributes:
        norm: its size.
        is_zero: whether each element is 0.
        gains: of a square matrix, or of each in a stack of them: how much lower the loss would be, as the gradient says, if
            it were transposed. Empty: the parameter is neither.
    """

    norm: float
    is_zero: bool
    gains: tuple[float, ...] = ()


def slopes(model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Slope]:
    """What the gradients of a row say of every parameter that one reaches. Each is let go when it has been looked at."""
    found: dict[str, Slope] = {}
    model.zero_grad(set_to_none=True)
    handles = [
        p.register_post_accumulate_grad_hook(functools.partial(_look, name, found))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    try:
        loss = _loss(model, row, chosen)
        with selected(chosen):  # layers that are computed again run as they ran
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def _look(name: str, found: dict[str, Slope], parameter: nn.Parameter) -> None:
    gradient, gains = parameter.grad, ()
    assert gradient is not None, "called when it has been accumulated"
    if parameter.ndim > 1 and parameter.shape[-1] == parameter.shape[-2]:
        weights, steps = (one.reshape(-1, *one.shape[-2:]) for one in (parameter.detach(), gradient))
        gains = tuple(
            -float((step.float() * (one.mT - one).float()).sum()) for one, step in zip(weights, steps, strict=True)
        )
    found[name] = Slope(float(gradient.float().norm()), not bool(gradient.any()), gains)
    parameter.grad = None


def _loss(model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]) -> Tensor:
    inputs = handed(row, next(model.parameters()).device)
    items = (inputs["shift_labels"] != IGNORED).sum().clamp(min=1)
    with selected(chosen), losses.step(items, router_loss=False):
        return model(**inputs, num_items_in_batch=items, use_cache=False).loss


@torch.no_grad()
def logits(model: nn.Module, row: Mapping[str, Any], chosen: Mapping[str, str]) -> Tensor:
    """`(S, V)` of a packed row, on the CPU in fp32, without dropout."""
    inputs = without_labels(handed(row, next(model.parameters()).device))
    with selected(chosen), evaluated(model):
        return model(**inputs, use_cache=False).logits[0].float().cpu()


def difference(actual: Tensor, expected: Tensor) -> float:
    """How far two tensors differ, as a share of the size of the second; infinite where one is not a number."""
    actual, expected = actual.double(), expected.double()
    share = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return share if share == share else float("inf")


def bar(dtype: torch.dtype) -> float:
    """What rounding may make of two ways to compute the same."""
    return TOLERANCE.get(dtype, HALF_PRECISION_TOLERANCE)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if len(text) < 300 else f"{text[:297]}..."
