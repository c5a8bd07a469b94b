"""Which tensors of upstream's each tensor of a generated model is made of: lists of experts upstream are stacks in ours.

    upstream                                   generated
    embed_tokens.weight                        embed_tokens.weight
    experts.0.gate_proj.weight [I, H]  \\
    experts.0.up_proj.weight   [I, H]   >      experts.gate_up_proj [E, 2I, H]
    ...                                /

The generated class's own checkpoint conversion says how, so that a proof compares what a checkpoint would be loaded as. It is
linear and loses nothing: gradients go the same way as weights. Tensors of one name are compared as they are; where all names
agree nothing is converted.
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
        made: name in the generated model -> how it is made of tensors that upstream calls otherwise.
        problems: sentences about tensors that cannot be made.
    """

    made: Mapping[str, LazyTensor] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether both models call their tensors alike."""
        return not self.made

    def apply(self, theirs: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Upstream's tensors by the generated model's names.

        One that is made of nothing but None is None; beside others None is zeros: an expert without tokens has no gradient
        of its own, and zeros in a stack.
        """
        if self.is_identity:
            return dict(theirs)
        used = {part.name for lazy in self.made.values() for part in leaves(lazy)}
        kept = {name: tensor for name, tensor in theirs.items() if name not in used}
        return kept | {name: _made(lazy, theirs) for name, lazy in self.made.items()}

    def present(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Upstream's gradients by the generated model's names, without those that are not there."""
        return {name: tensor for name, tensor in self.apply(theirs).items() if tensor is not None}

    def step(self, theirs: Step) -> Step:
        """Upstream's step with its gradients by the generated model's names."""
        return theirs if self.is_identity else replace(theirs, gradients=self.apply(theirs.gradients))

    def undo(self, model: PreTrainedModel, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a generated model by upstream's names."""
        return dict(ours) if self.is_identity else disassemble(model, ours, layout=None, origin=None)


def correspondence(upstream: PreTrainedModel, generated: PreTrainedModel) -> Correspondence:
    """Of two models with one config."""
    theirs, ours = dict(upstream.named_parameters()), dict(generated.named_parameters())
    stored = {
        name: leaf(name, tensor.shape, tensor.dtype, None) for name, tensor in theirs.items() if name not in ours
    }
    if not stored:
        return Correspondence()
    found = assemble(generated, stored)
    made = {
        name: lazy
        for name, lazy in found.parameters.items()
        if name not in theirs and not isinstance(lazy.origin, Leaf)  # another name alone is a difference
    }
    return Correspondence(made, tuple(found.problems))


def _made(lazy: LazyTensor, theirs: Mapping[str, Tensor | None]) -> Tensor | None:
    present = [one for part in leaves(lazy) if (one := theirs.get(part.name)) is not None]
    if not present:
        return None
    out = torch.zeros(lazy.shape, dtype=present[0].dtype)
    plan = plan_reads(lazy, full_region(lazy.shape), out)
    for part, region, target in plan.reads:
        if (one := theirs.get(part.name)) is not None:
            target.copy_(one.detach()[tuple(slice(*bounds) for bounds in region)])
        else:
            target.zero_()
    plan.finish()
    return out
