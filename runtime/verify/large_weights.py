"""Weights of feed-forward layers, experts and the head, scaled up: clamps, caps and thresholds bite on large values only.

    fresh weights      gate and up of an expert are about 0.2, far below a clamp at 7.0, and a fused kernel may lose it unseen
    times `FACTOR`     they are about 8

Weights are found by what a module is made of, in any file:

    experts            a stack of matrices (E, n, m)
    feed-forward       matrices beside an activation: an MLP, a gated unit, one half of a BERT layer
    head               the projection to the vocabulary

Attention and recurrences stay as they are: a softmax of large scores is a choice, and no rounding compares with another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.verify.correspondence import Correspondence

FACTOR = 40.0
"""With it an expert's gate of a small model exceeds the largest limit that a released model has (10.0)."""
NO_ACTIVATIONS = (nn.Dropout, nn.Identity, nn.Softmax, nn.Flatten, nn.Unflatten)
"""Modules without parameters that are not what makes a layer a feed-forward one."""


def scaled_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The weights that are scaled, by the first of their names."""
    found = {id(weight) for module in model.modules() for weight in _feed_forward(module)}
    head = model.get_output_embeddings()
    if head is not None and isinstance(weight := getattr(head, "weight", None), nn.Parameter):
        found.add(id(weight))
    return {name: weight for name, weight in model.named_parameters() if id(weight) in found}


def _feed_forward(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of a module that is experts or feed-forward; a recurrence has vectors or a convolution beside them."""
    own, children = list(module.parameters(recurse=False)), list(module.children())
    if type(module).__module__.startswith("torch.") and not isinstance(module, nn.Sequential):
        return []
    if any(weight.ndim == 1 for weight in own) or any(
        isinstance(child, nn.modules.conv._ConvNd) for child in children
    ):
        return []
    stacks = [weight for weight in own if weight.ndim == 3 and len(weight) > 1]
    if not stacks and not any(_is_activation(child) for child in children):
        return []
    matrices = [weight for weight in own if weight.ndim >= 2]
    if not stacks and len(matrices) == 1:
        matrices = []  # of a router, whose choices are not to be moved
    for child in children:
        weight = getattr(child, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2 and not isinstance(child, nn.Embedding):
            matrices.append(weight)
    return [weight for weight in matrices if weight.is_floating_point()]


def _is_activation(module: nn.Module) -> bool:
    """Whether a module only computes: it holds no tensors and no modules."""
    holds = next(module.parameters(), None), next(module.buffers(), None), next(module.children(), None)
    return not any(one is not None for one in holds) and not isinstance(module, NO_ACTIVATIONS)


@contextlib.contextmanager
def large_weights(
    upstream: PreTrainedModel, generated: PreTrainedModel, correspondence: Correspondence
) -> Iterator[None]:
    """Within the block the weights of both models are scaled."""
    weights: list[Tensor] = [weight.data for weight in scaled_weights(upstream).values()]
    originals = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.mul_(FACTOR)
        _copy(upstream, generated, correspondence)
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original)
        _copy(upstream, generated, correspondence)


def _copy(upstream: nn.Module, generated: nn.Module, correspondence: Correspondence) -> None:
    with torch.no_grad():
        generated.load_state_dict(correspondence.to_generated(upstream.state_dict()), strict=True)
