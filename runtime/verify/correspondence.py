"""Which of upstream's tensors each tensor of a generated model is built from: upstream's lists of experts are stacks in ours.

    upstream                                   generated
    embed_tokens.weight                        embed_tokens.weight
    experts.0.gate_proj.weight [I, H]  \\
    experts.0.up_proj.weight   [I, H]   >      experts.gate_up_proj [E, 2I, H]
    ...                                /

    E experts   I intermediate size of an expert   H hidden size

The generated class's own checkpoint conversion is used, so a proof compares what a checkpoint would be loaded as. It is linear
and invertible, so gradients convert like weights. Tensors whose name is in both models are not converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from patchgen.runtime.checkpoint.layout import assemble, disassemble
from patchgen.runtime.checkpoint.lazy_tensors import LazyTensor, Leaf, full_region, leaf, leaves, plan_reads
from patchgen.runtime.verify.comparison import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Correspondence:
    """How tensors of upstream's model become those of the generated one.

    Attributes:
        conversions: name in the generated model -> how it is built from tensors with other names upstream.
        problems: sentences about tensors that cannot be built.
    """

    conversions: Mapping[str, LazyTensor] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether both models have the same tensor names."""
        return not self.conversions

    def to_generated(self, upstream: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Upstream's tensors by the generated model's names.

        A tensor built from None only is None. Otherwise None becomes zeros: an expert without tokens has no gradient
        upstream, and zeros in a stack.
        """
        if self.is_identity:
            return dict(upstream)
        converted = {part.name for conversion in self.conversions.values() for part in leaves(conversion)}
        unchanged = {name: tensor for name, tensor in upstream.items() if name not in converted}
        return unchanged | {name: _convert(conversion, upstream) for name, conversion in self.conversions.items()}

    def existing(self, upstream: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`to_generated` without the tensors that are None."""
        return {name: tensor for name, tensor in self.to_generated(upstream).items() if tensor is not None}

    def step(self, upstream: Step) -> Step:
        """Upstream's step with its gradients by the generated model's names."""
        return upstream if self.is_identity else replace(upstream, gradients=self.to_generated(upstream.gradients))

    def to_upstream(self, model: PreTrainedModel, generated: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a generated model by upstream's names."""
        return dict(generated) if self.is_identity else disassemble(model, generated, layout=None, origin=None)


def correspondence(upstream: PreTrainedModel, generated: PreTrainedModel) -> Correspondence:
    """The correspondence of two models with one config."""
    upstream_parameters, generated_parameters = dict(upstream.named_parameters()), dict(generated.named_parameters())
    stored = {
        name: leaf(name, tensor.shape, tensor.dtype, None)
        for name, tensor in upstream_parameters.items()
        if name not in generated_parameters
    }
    if not stored:
        return Correspondence()
    assembled = assemble(generated, stored)
    conversions = {
        name: conversion
        for name, conversion in assembled.parameters.items()
        if name not in upstream_parameters
        and not isinstance(conversion.node, Leaf)  # a mere renaming is a structural difference
    }
    return Correspondence(conversions, tuple(assembled.problems))


def _convert(conversion: LazyTensor, upstream: Mapping[str, Tensor | None]) -> Tensor | None:
    existing = [tensor for part in leaves(conversion) if (tensor := upstream.get(part.name)) is not None]
    if not existing:
        return None
    out = torch.zeros(conversion.shape, dtype=existing[0].dtype)
    plan = plan_reads(conversion, full_region(conversion.shape), out)
    for part, bounds_by_dim, target in plan.reads:
        if (tensor := upstream.get(part.name)) is not None:
            target.copy_(tensor.detach()[tuple(slice(*bounds) for bounds in bounds_by_dim)])
        else:
            target.zero_()
    plan.finish()
    return out
