"""What each layer of a model computes of one row, and where two models first differ.

The modules of every layer are watched two levels deep, in the order in which they end, so the first that differs is the
innermost: `model.layers.3.mlp.gate` before `model.layers.3.mlp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime.doctor import calls
from patchgen.runtime.parallel import sharding
from patchgen.runtime.verify.conditioning import ROUNDING
from patchgen.runtime.verify.training_inputs import without_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEPTH = 2
MOST = 0.3
"""No rounding excuses more: what is wrong differs by about its own size."""


@dataclass(frozen=True)
class Trace:
    """The outputs of modules by path, in the order in which they ended, and the logits `(S, V)`; on the CPU, in fp32."""

    outputs: Mapping[str, Tensor]
    logits: Tensor


@dataclass(frozen=True)
class Divergence:
    """The first module whose outputs differ by more than the bar, and by how much."""

    path: str
    share: float


def watched(model: nn.Module) -> list[str]:
    """The paths of the layers and of what they hold, two levels deep."""
    layers = {id(layer) for layer in sharding.find_layers(model, None)}
    roots = [path for path, module in model.named_modules() if id(module) in layers]
    found = []
    for root in roots:
        for path, _ in model.get_submodule(root).named_modules(prefix=root):
            if path.count(".") - root.count(".") <= DEPTH:
                found.append(path)
    return found


def record(model: PreTrainedModel, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """What a generated model computes eagerly, attention included."""
    with calls.eager_attention(model):
        return record_as(model, inputs, paths, {})


def record_as(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str], chosen: Mapping[str, str]) -> Trace:
    """What a generated model computes with these kernels and the attention that it has."""
    with calls.selected(chosen):
        return record_plain(model, without_labels(inputs), paths)


@torch.no_grad()
def record_plain(model: nn.Module, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """What any model computes of inputs without labels."""
    outputs: dict[str, Tensor] = {}
    known = dict(model.named_modules())
    handles = [known[path].register_forward_hook(_keeper(path, outputs)) for path in paths if path in known]
    was_training = model.training
    model.eval()
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return Trace(outputs, logits[0].float().cpu())


def _keeper(path: str, outputs: dict[str, Tensor]) -> Callable:
    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs[path] = first.float().cpu()

    return keep


def record_shaken(model: PreTrainedModel, inputs: Mapping[str, Any], paths: Sequence[str]) -> Trace:
    """As `record`, the embeddings of the tokens moved by their last bit: how far rounding alone carries."""
    generator = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + noise * torch.finfo(output.dtype).eps)

    handle = model.get_input_embeddings().register_forward_hook(shake)
    try:
        return record(model, inputs, paths)
    finally:
        handle.remove()


@dataclass(frozen=True)
class Yardstick:
    """What one model computes eagerly, and what of it rounding moves.

    In 16 bits a token near a tie goes to other experts, and the layers behind carry that on: a fixed bar would be too low
    for deep models, or too high for shallow ones.
    """

    expected: Trace
    shaken: Trace
    bar: float

    def first_divergence(self, actual: Trace) -> Divergence | None:
        """Where another trace first differs from what is expected by more than rounding; None: nowhere."""
        for path, output in self.expected.outputs.items():
            other = actual.outputs.get(path)
            if other is None or other.numel() != output.numel():
                continue
            share = calls.difference(other.flatten(), output.flatten())
            moved = self.shaken.outputs[path]
            if not share <= self._bound(calls.difference(moved.flatten(), output.flatten())):
                return Divergence(path, share)
        share = calls.difference(actual.logits, self.expected.logits)
        return None if share <= self.of_logits else Divergence("the logits", share)

    @property
    def of_logits(self) -> float:
        """What rounding may make of logits."""
        return self._bound(calls.difference(self.shaken.logits, self.expected.logits))

    def _bound(self, moved: float) -> float:
        return min(MOST, max(self.bar, ROUNDING * moved))
