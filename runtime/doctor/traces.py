"""The outputs of a model's layers for one row, and where two models first differ.

Modules are recorded two levels deep in every layer, in the order in which they return, so the first that differs is the
innermost: `model.layers.3.mlp.gate` before `model.layers.3.mlp`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.doctor import calls
from patchgen.runtime.doctor.finding import first_names
from patchgen.runtime.objectives.learning import evaluating
from patchgen.runtime.parallel import sharding
from patchgen.runtime.verify.conditioning import ROUNDING_FACTOR
from patchgen.runtime.verify.training_inputs import without_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_DEPTH = 2
MAX_ROUNDING = 0.3
"""The largest relative difference that can be attributed to rounding."""


@dataclass(frozen=True)
class Trace:
    """The outputs of modules by path, in the order in which they returned, and the logits `(S, V)` of S tokens over a
    vocabulary of V; on the CPU, in fp32."""

    outputs: Mapping[str, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class Divergence:
    """The first module (or "the logits") whose output differs by more than rounding, and its relative difference."""

    path: str
    relative_difference: float


def recorded_paths(model: nn.Module) -> list[str]:
    """The paths of the layers and of their modules, two levels deep."""
    layers = {id(layer) for layer in sharding.find_layers(model, None)}
    roots = [path for path, module in model.named_modules() if id(module) in layers]
    paths = []
    for root in roots:
        for path, _ in model.get_submodule(root).named_modules(prefix=root):
            if path.count(".") - root.count(".") <= MAX_DEPTH:
                paths.append(path)
    return paths


def record(model: PreTrainedModel, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """The trace of a generated model with eager kernels and attention."""
    with calls.eager_attention(model):
        return record_with_kernels(model, inputs, paths, {})


def record_with_kernels(
    model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str], kernels: Mapping[str, str]
) -> Trace:
    """The trace of a generated model with these kernels and its own attention."""
    with calls.using_kernels(kernels):
        return record_plain(model, without_labels(inputs), paths)


@torch.no_grad()
def record_plain(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """The trace of any model on inputs without labels, without dropout."""
    outputs: dict[str, Tensor] = {}
    known = dict(model.named_modules())

    def record_output(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs[path] = first.float().cpu()

    with contextlib.ExitStack() as hooks:
        for path in paths:
            if path in known:
                hooks.enter_context(known[path].register_forward_hook(functools.partial(record_output, path)))
        hooks.enter_context(evaluating(model))
        logits = model(**inputs, use_cache=False).logits
    return Trace(outputs, logits[0].float().cpu())


def record_perturbed(model: PreTrainedModel, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """As `record`, with token embeddings perturbed by the eps of their dtype: how far rounding errors propagate."""
    generator = torch.Generator().manual_seed(0)

    def perturb(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + noise * torch.finfo(output.dtype).eps)

    with model.get_input_embeddings().register_forward_hook(perturb):
        return record(model, inputs, paths)


@dataclass(frozen=True)
class ExpectedTrace:
    """An eager trace, and the same with perturbed embeddings, which shows how far rounding errors move it.

    In 16 bits a token near a tie is routed to other experts, and later layers propagate that: a fixed tolerance would be
    too small for deep models, or too large for shallow ones.
    """

    expected: Trace
    perturbed: Trace
    tolerance: float

    def first_divergence(self, actual: Trace) -> Divergence | None:
        """Where another trace first differs by more than rounding; None: nowhere."""
        for path, output in self.expected.outputs.items():
            other = self._counterpart(actual, path)
            if other is None:
                continue
            difference = calls.difference(other.flatten(), output.flatten())
            perturbed = self.perturbed.outputs[path]
            if not difference <= self._bound(calls.difference(perturbed.flatten(), output.flatten())):
                return Divergence(path, difference)
        difference = calls.difference(actual.logits, self.expected.logits)
        return None if difference <= self.logits_tolerance else Divergence("the logits", difference)

    def not_compared(self, actual: Trace) -> str:
        """A sentence, to append to a finding, about modules that `first_divergence` cannot compare; empty if there are none.

        An implementation may compute without calling a module, or return its output in another form.
        """
        paths = [path for path in self.expected.outputs if self._counterpart(actual, path) is None]
        if not paths:
            return ""
        return (
            f" {len(paths)} of {len(self.expected.outputs)} modules were not compared: the two sides have no output of the same "
            f"size for them ({first_names(paths)})."
        )

    def _counterpart(self, actual: Trace, path: str) -> Tensor | None:
        """The output of a module in another trace, if it has one of the same size."""
        other = actual.outputs.get(path)
        return other if other is not None and other.numel() == self.expected.outputs[path].numel() else None

    @property
    def logits_tolerance(self) -> float:
        """The largest relative difference of the logits that rounding explains."""
        return self._bound(calls.difference(self.perturbed.logits, self.expected.logits))

    def _bound(self, perturbation: float) -> float:
        return min(MAX_ROUNDING, max(self.tolerance, ROUNDING_FACTOR * perturbation))
